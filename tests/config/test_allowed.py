from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpo.config.allowed import ALLOW, DATA_DIR, check_allowed, places
from hpo.config.study_config import load_study
from hpo.errors import InputError

LOCATION = "checkpoint.location"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the working folder `here`, whose `runs` leads to `disk`, and others."""
    for name in ("here", "disk", "kept", "data", "private"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "kept" / "link").symlink_to(tmp_path / "private")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv(ALLOW, os.pathsep.join([f"{tmp_path}/kept", "s3://bucket/of/us", "gs://all"]))
    monkeypatch.setenv(DATA_DIR, str(tmp_path / "data"))
    return tmp_path


@pytest.mark.parametrize(
    ("key", "place", "is_allowed"),
    [
        (LOCATION, "{}/here/any", True),
        (LOCATION, "{}/here/runs/any", True),
        (LOCATION, "{}/kept", True),
        (LOCATION, "s3://bucket/of/us/a", True),
        (LOCATION, "gs://all", True),
        (LOCATION, "{}/here2", False),
        (LOCATION, "{}/here/../private", False),
        (LOCATION, "{}/kept/link/a", False),
        (LOCATION, "{}/data", False),
        (LOCATION, "s3://bucket/of/user", False),
        (LOCATION, "s3://bucket/of/us/../them", False),
        (LOCATION, "gs://bucket/of/us", False),
        ("data.path", "{}/data", True),
        ("data.path", "{}/nowhere", True),  # and so read from HPO_DATA_DIR, or not at all
        ("data.path", "{}/private", False),
    ],
)
def test_what_lies_under_a_folder_or_bucket_of_this_machine(
    machine: Path, key: str, place: str, is_allowed: bool
) -> None:
    named = {key: place.format(machine)}
    check_allowed("tiny", named, of_file=named)
    if is_allowed:
        check_allowed("tiny", named)
    else:
        with pytest.raises(InputError, match=rf"{key}: the study `tiny` .*under what HPO_ALLOW names"):
            check_allowed("tiny", named)


def test_an_encoder_is_read_where_this_machine_allows(machine: Path) -> None:
    (machine / "here" / "model").mkdir()
    (machine / "private" / "model").mkdir()
    fresh = {"model_type": "bert", "tokenizer": f"{machine}/private/model"}
    study = {
        "name": "tiny",
        "data": {"source": "synthetic"},
        "model": {"encoder": f"{machine}/private/model"},
    }
    for changes, key in (
        ({}, "model.encoder"),
        ({"model": {"encoder": fresh}}, "model.encoder"),
        ({"model": {"encoder": "../private/model"}}, "model.encoder"),
        (
            {
                "model": {},
                "search_space": {"encoder": {"type": "categorical", "choices": ["./model", fresh]}},
            },
            "search_space.encoder.choices.1",
        ),
    ):
        path = machine / "here" / "tiny.yaml"
        path.write_text(json.dumps(study | changes))
        with pytest.raises(InputError, match=rf"{key}: the study `tiny` .*under what HPO_ALLOW names"):
            check_allowed("tiny", places(load_study(path)))
        check_allowed("tiny", places(load_study(path)), of_file=places(load_study(path)))
    path.write_text(json.dumps(study | {"model": {"encoder": "./model"}}))
    check_allowed("tiny", places(load_study(path)))
