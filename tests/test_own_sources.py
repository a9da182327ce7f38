"""Sources of data that a study's own code brings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import hpo_command, ok
from own_code_studies import TASKS, write

from hpo.config.study_config import load_study, stored_study
from hpo.data.dataset import load_data
from hpo.errors import InputError

pytestmark = pytest.mark.usefixtures("forgotten")

KINDS = {"times": {"kind": "regression"}, "tone": TASKS["tone"]}
SCORE = {"metric": "score"}
SOURCE = """
import hpo


class Posts(hpo.Section):
    size: int = 20
    path: hpo.StudyPath | None = None


@hpo.source("posts", Posts)
def posts(split, options):
    if split == "validation":
        return None
    if options.path is not None:
        options.path.read_text()
    words = ["it hurts " * (n % 5) + "today" for n in range(options.size)]
    return ({"text": text, "labels": {"times": text.count("hurts"), "tone": "no"}} for text in words)
"""
POSTS = {"source": "posts", "tasks": KINDS, "options": {"size": 30}, "validation_fraction": 0.3}


def test_a_source(tmp_path: Path) -> None:
    config = load_study(write(tmp_path, SOURCE, data=POSTS))
    data = load_data(config.data)
    train, validation, test = (len(data.splits[split]) for split in ("train", "validation", "test"))
    assert (train + validation, test) == (30, 30), "there is no validation split: it is drawn from train"
    assert data.splits["test"][4].labels == {"times": 4.0, "tone": "no"}
    assert data.splits["test"][4].id == "test-5"
    assert load_data(config.data).fingerprint == data.fingerprint
    assert stored_study("tiny", json.loads(json.dumps(config.definition()))).data == config.data


@pytest.mark.parametrize(
    ("changes", "old", "new", "message"),
    [
        ({"options": {"size": "many"}}, "", "", r"data\.options\.size: must be a whole number"),
        ({"options": {"sise": 3}}, "", "", r"data\.options\.sise: there is no such key"),
        ({"source": "post"}, "", "", r"data\.source: must be one of synthetic, .*, but got `post`"),
        ({"path": "rows"}, "", "", r"data\.path: is read with source jsonl, csv, parquet, but"),
        ({"tasks": None}, "", "", r"data\.tasks: must be given for source posts"),
        ({"source": "jsonl", "path": "rows"}, "", "", r"data\.options: is read with source of your own code"),
        ({}, '"tone": "no"', '"tone": "maybe"', r"60 bad rows .*posts train row 1: .*unknown class `maybe`"),
        ({}, '"tone": "no"', '"tone": {1}', r"posts train row 1: must be what JSON can hold, but .*set"),
        ({}, "return None", "return 1 / 0", r"own_kind\.py:13: ZeroDivisionError: division by zero"),
        ({}, "range(options.size)", "range(0)", r"posts train: the train split must have rows"),
        ({"options": {"path": "gone"}}, "", "", r"own_kind\.py:15: FileNotFoundError: .*/gone"),
    ],
)  # fmt: skip
def test_a_source_that_is_wrong(
    tmp_path: Path, changes: dict[str, Any], old: str, new: str, message: str
) -> None:
    with pytest.raises(InputError, match=rf"(?s){message}"):
        load_data(load_study(write(tmp_path, SOURCE.replace(old, new), data=POSTS | changes)).data)


def test_the_options_of_a_source_name_no_other_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is trusted; what the database would have it read is not."""
    made, here = tmp_path / "made", tmp_path / "here"
    made.mkdir()
    here.mkdir()
    (made / "secret").write_text("a secret")
    path = write(made, SOURCE, data=POSTS | {"options": {"path": "secret", "size": 30}}, objective=SCORE)
    ok(hpo_command(made, "init", path.name))
    monkeypatch.delenv("HPO_ALLOW", raising=False)
    (here / "own_kind.py").write_text(SOURCE)
    worker = ("worker", "tiny", "--storage", f"sqlite:///{made}/runs/hpo.db", "--trust-code", "own_kind.py")
    refused = hpo_command(here, *worker)
    told = "data.options.path: the study `tiny` of the database names"
    assert (refused.exit_code, told in refused.err) == (2, True), refused
    monkeypatch.setenv("HPO_ALLOW", str(made))
    ok(hpo_command(here, *worker))
