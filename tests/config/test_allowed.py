import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpo.config.allowed import ALLOW, DATA_DIR, check_allowed, paths_of
from hpo.config.study_config import load_study
from hpo.errors import InputError

LOCATION = "checkpoint.location"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the working folder `here`, whose `runs` is a link to `disk`, and others."""
    for name in ("here", "disk", "kept", "data", "private"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "kept" / "link").symlink_to(tmp_path / "private")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv(ALLOW, os.pathsep.join([f"{tmp_path}/kept", "s3://bucket/of/us", "gs://all"]))
    monkeypatch.setenv(DATA_DIR, str(tmp_path / "data"))
    return tmp_path


@pytest.mark.parametrize(
    ("key", "path"),
    [
        *((LOCATION, path) for path in ("{}/here/any", "{}/here/runs/any", "{}/kept")),
        *((LOCATION, path) for path in ("s3://bucket/of/us/a", "gs://all")),
        ("data.path", "{}/data"),
        ("data.path", "{}/nowhere"),  # read from HPO_DATA_DIR
    ],
)
def test_allowed_paths(machine: Path, key: str, path: str) -> None:
    check_allowed("tiny", {key: path.format(machine)})


@pytest.mark.parametrize(
    ("key", "path"),
    [
        *((LOCATION, path) for path in ("{}/here2", "{}/here/../private", "{}/kept/link/a", "{}/data")),
        *((LOCATION, path) for path in ("s3://bucket/of/user", "s3://bucket/of/us/../them")),
        (LOCATION, "gs://bucket/of/us"),
        ("data.path", "{}/private"),
    ],
)
def test_other_paths_need_users_own_file(machine: Path, key: str, path: str) -> None:
    named = {key: path.format(machine)}
    check_allowed("tiny", named, of_file=named)
    with pytest.raises(InputError, match=rf"{key}: the study `tiny` .* in a folder of HPO_ALLOW"):
        check_allowed("tiny", named)


@pytest.mark.parametrize("form", ["folder", "tokenizer", "relative", "searched"])
def test_encoder_needs_allowed_folder(machine: Path, form: str) -> None:
    (machine / "here" / "model").mkdir()
    (machine / "private" / "model").mkdir()
    fresh = {"model_type": "bert", "tokenizer": f"{machine}/private/model"}
    choices = {"encoder": {"type": "categorical", "choices": ["./model", fresh]}}
    changes: dict[str, Any] = {
        "folder": {"model": {"encoder": f"{machine}/private/model"}},
        "tokenizer": {"model": {"encoder": fresh}},
        "relative": {"model": {"encoder": "../private/model"}},
        "searched": {"search_space": choices},
    }[form]
    path = machine / "here" / "tiny.yaml"
    path.write_text(json.dumps({"name": "tiny", "data": {"source": "synthetic"}} | changes))
    key = "search_space.encoder.choices.1" if form == "searched" else "model.encoder"
    with pytest.raises(InputError, match=f"{key}: the study `tiny`"):
        check_allowed("tiny", paths_of(load_study(path)))
    path.write_text(path.read_text().replace(f"{machine}/private", ".").replace("../private", "."))
    check_allowed("tiny", paths_of(load_study(path)))
