"""Whole studies through the command line."""

from __future__ import annotations

import itertools
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from support.command_line import hpo_command, ok, stored
from support.tiny import write_study

from hpo.report.tables import StudyTables
from hpo.study.running import stopping
from hpo.study.running.stopping import WORKERS_ON_DEVICE
from hpo.trial import base_run

SPACE: dict[str, Any] = {"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-3, "log": True}}
TRAINING: dict[str, Any] = {"max_steps": 4, "batch_size": 8, "max_length": 64, "dropout": 0.0}


def kept(folder: Path) -> list[int]:
    """Numbers of the trials with checkpoints."""
    return sorted(
        int(path.name.removeprefix("trial-")) for path in folder.glob("runs/*/checkpoints-*/trial-*")
    )


def test_two_workers_run_exactly_n_trials(tmp_path: Path) -> None:
    write_study(
        tmp_path,
        n_trials=5,
        search_space=SPACE | {"batch_size": {"type": "categorical", "choices": [8, 16]}},
        training={k: v for k, v in TRAINING.items() if k != "batch_size"},
        device="cpu",
    )
    text = ok(hpo_command(tmp_path, "run", "tiny.yaml", "--workers-per-device", "2")).out
    record = stored(tmp_path)
    assert record.counts == {"open": 0, "running": 0, "done": 5}
    assert [trial.outcome for trial in record.trials] == ["complete"] * 5
    assert len({trial.attributes["worker"] for trial in record.trials}) <= 2
    assert len({str(trial.params) for trial in record.trials}) == 5
    line = r"^trial +\d  complete +score 0\.\d+  batch_size=\d+ learning_rate="
    assert len(re.findall(line, text, re.MULTILINE)) == 5
    assert all(trial.telemetry["device"]["shared"] for trial in record.trials)
    tables = StudyTables(record)
    assert not tables.trials["counts_for_speed"].any()
    assert tables.by_precision["measured"].tolist() == [0]
    for number in range(2):
        [_] = tmp_path.glob(f"runs/tiny/worker-{socket.gethostname()}-*-{number}.log")
    assert len(kept(tmp_path)) == 3

    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--n-trials", "6"))
    last = StudyTables(stored(tmp_path)).trials.iloc[-1]
    assert (last["shared"], last["counts_for_speed"]) == (False, True)


def test_mistake_leaves_nothing_behind(tmp_path: Path) -> None:
    """So the mended file is not another definition of a stored study."""
    write_study(tmp_path, objective={"metric": "criteria/f1_mikro"})
    for command in (("run",), ("run", "--workers", "2"), ("worker",), ("init",)):
        refused = hpo_command(tmp_path, *command, "tiny.yaml")
        assert (refused.exit_code, refused.out) == (2, ""), "no study is announced"
        assert "Did you mean `criteria/f1_micro`?" in refused.err
    assert not list(tmp_path.glob("runs/hpo.db*"))
    write_study(tmp_path)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))


def test_study_without_a_complete_trial_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path, max_retries=0)
    monkeypatch.setattr(base_run, "MixedPrecision", lambda *_: 1 / 0)
    finished = hpo_command(tmp_path, "run", "tiny.yaml")
    assert finished.exit_code == 1
    assert "has ended without a complete trial" in finished.err
    assert "The last one ended as failed: ZeroDivisionError: division by zero\nTraceback" in finished.err
    assert hpo_command(tmp_path, "best", "tiny.yaml").exit_code == 1


@pytest.mark.parametrize(
    ("command", "num_failed", "supervised", "exit_code"),
    [("run", 2, False, 1), ("run", 1, False, 0), ("worker", 2, False, 1), ("worker", 2, True, 0)],
)
def test_exit_code_of_mostly_failed_trials(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    num_failed: int,
    supervised: bool,
    exit_code: int,
) -> None:
    """A supervisor counts the trials of all its workers, and must not start one again for this."""
    write_study(tmp_path, n_trials=3, max_retries=0)
    make, made = base_run.MixedPrecision, itertools.count()
    monkeypatch.setattr(
        base_run, "MixedPrecision", lambda *args: make(*args) if next(made) >= num_failed else 1 / 0
    )
    if supervised:
        monkeypatch.setenv(WORKERS_ON_DEVICE, "1")
        monkeypatch.setattr(stopping, "stop_at_end_of_input", lambda *_: None)
    finished = hpo_command(tmp_path, command, "tiny.yaml")
    assert finished.exit_code == exit_code
    said = "Error: 2 of 3 trials failed here. `hpo report tiny` shows why.\n"
    assert finished.err.endswith(said) == bool(exit_code)


# What this device cannot run
