"""Bad input of every kind, given to `hpo run`: one message, the right exit code, and nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Finished, hpo_command, ok
from support.jsonl_sets import write_set
from support.tiny import write_study

TASKS: dict[str, Any] = {"tone": {"kind": "single_label", "classes": ["calm", "angry"]}}
ROW: dict[str, Any] = {"id": "b", "text": "Ann works.", "labels": {"tone": "calm"}}


def check_refused(folder: Path, finished: Finished, message: str, exit_code: int = 2) -> None:
    assert finished.exit_code == exit_code, finished
    assert re.search("^Error: ", finished.err, re.MULTILINE)
    assert finished.err.count("Error") == 1
    assert "Traceback" not in finished.err
    assert re.search(message, finished.err, re.DOTALL), finished.err
    assert not list(folder.glob("runs/**/trial-*")), "no trial has begun"
    assert not list(folder.glob("runs/**/*.tmp"))
    assert not list(folder.glob("runs/hpo.db*")), "no study is made"


def write_data(folder: Path, *rows: Any) -> None:
    """A study on a JSONL data set of a good row and `rows`."""
    write_set(folder, TASKS, train=[{**ROW, "id": "a"}, *rows], validation=[{**ROW, "id": "v"}])
    write_study(folder, data={"source": "jsonl", "path": "."})


@pytest.mark.parametrize("command", ["run", "worker", "init", "train", "verify"])
def test_study_file(tmp_path: Path, command: str) -> None:
    """What may be wrong with a study file is in test_bad_study_files.py."""
    write_study(tmp_path, n_trials=-1, prunner={}, pruner={"name": "medium"})
    message = r"n_trials: .*\n.*pruner\.name: .*Did you mean `median`.*\n.*prunner: .*Did you mean `pruner`"
    check_refused(tmp_path, hpo_command(tmp_path, command, "tiny.yaml"), message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [(), ("--workers", "2")])
def test_data(tmp_path: Path, options: tuple[str, ...]) -> None:
    """What may be wrong with data is in test_bad_data.py; several workers report it as one does."""
    write_data(tmp_path, {**ROW, "labels": {"tone": "clam"}}, {**ROW, "text": ""})
    message = (
        r"train\.jsonl:2: labels\.tone: unknown class `clam`\. Did you mean `calm`.*train\.jsonl:3: `text` is"
    )
    check_refused(tmp_path, hpo_command(tmp_path, "run", "tiny.yaml", *options), message)


def test_data_that_were_edited_since_the_study_was_made(tmp_path: Path) -> None:
    rows = [{"id": str(i), "text": f"Ann works {i}.", "labels": {"tone": "calm"}} for i in range(8)]
    write_data(tmp_path, *rows)
    study_file, train = tmp_path / "tiny.yaml", tmp_path / "train.jsonl"
    ok(hpo_command(tmp_path, "run", study_file, "--n-trials", "1"))
    content = train.read_text()
    train.write_text(content.replace("calm", "angry", 1))
    for command in (("run", "--n-trials", "2"), ("best", "--evaluate", "validation")):
        refused = hpo_command(tmp_path, command[0], study_file, *command[1:])
        assert refused.exit_code == 2
        assert "The data of the study `tiny` have changed since it was made" in refused.err
    train.write_text(content)
    ok(hpo_command(tmp_path, "run", study_file, "--n-trials", "2"))


def test_reading_needs_no_right_to_write(tmp_path: Path) -> None:
    write_study(tmp_path)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    url = f"sqlite:///file:{tmp_path}/runs/hpo.db?mode=ro&uri=true"
    status = ok(hpo_command(tmp_path, "status", "tiny.yaml", "--storage", url, "--json")).json
    assert status["trials"]["open"] == 2
