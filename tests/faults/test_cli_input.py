"""Bad input of every kind, given to commands: one message, the right exit code, and nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Finished, hpo_command
from support.jsonl_sets import write_set
from support.tiny import write_study

TASKS: dict[str, Any] = {"tone": {"kind": "single_label", "classes": ["calm", "angry"]}}
ROW: dict[str, Any] = {"id": "b", "text": "Ann works.", "labels": {"tone": "calm"}}


def check_refused(folder: Path, finished: Finished, message: str) -> None:
    assert finished.exit_code == 2, finished
    assert finished.err.count("Error") == 1
    assert "Traceback" not in finished.err
    assert re.search(f"^Error: .*{message}", finished.err, re.DOTALL | re.MULTILINE), finished.err
    assert not list(folder.glob("runs/**/*.tmp"))
    assert not list(folder.glob("runs/hpo.db*")), "no study is made"


@pytest.mark.parametrize("command", ["run", "worker", "init", "train", "verify"])
def test_a_wrong_study_file_is_refused(tmp_path: Path, command: str) -> None:
    """For the other faults of a study file see test_bad_study_files.py."""
    write_study(tmp_path, n_trials=-1, prunner={}, pruner={"name": "medium"})
    message = r"n_trials: .*\n.*pruner\.name: .*Did you mean `median`.*\n.*prunner: .*Did you mean `pruner`"
    check_refused(tmp_path, hpo_command(tmp_path, command, "tiny.yaml"), message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [(), ("--workers", "2")])
def test_wrong_data_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    """For the other faults of data see test_bad_data.py; several workers report it like one."""
    rows = [{**ROW, "id": "a"}, {**ROW, "labels": {"tone": "clam"}}, {**ROW, "text": ""}]
    write_set(tmp_path, TASKS, train=rows, validation=[{**ROW, "id": "v"}])
    write_study(tmp_path, data={"source": "jsonl", "path": "."})
    message = r"train\.jsonl:2: labels\.tone: unknown class `clam`\. .*train\.jsonl:3: `text` is"
    check_refused(tmp_path, hpo_command(tmp_path, "run", "tiny.yaml", *options), message)
