"""The study `watched`: a callback and a sampler of the user's own code, and patience; killed and resumed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import yaml
from command_line import ROOT, finish, ok, saved_steps, start_hpo, stored, wait_until


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_study_is_killed_and_goes_on(tmp_path: Path, workers: str) -> None:
    for name in ("watched.py", "watched.yaml"):
        shutil.copy(ROOT / "studies" / name, tmp_path)
    study = yaml.safe_load((tmp_path / "watched.yaml").read_text())
    study |= {"name": "tiny", "n_trials": 3, "checkpoint": {"every_seconds": 0.1}}
    study["training"] |= {"max_length": 64, "max_steps": 100}
    study["data"]["synthetic"] |= {"num_train": 64}
    (tmp_path / "watched.yaml").write_text(yaml.safe_dump(study))
    run = ("run", "watched.yaml", "--workers", workers)
    process = start_hpo(tmp_path, *run)
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    ok(finish(start_hpo(tmp_path, *run)))
    trials = stored(tmp_path).trials
    assert [trial.outcome for trial in trials] == ["complete"] * 3
    assert all(trial.telemetry["callback_seconds"] > 0 for trial in trials)
    assert any("resumed_from_step" in trial.telemetry for trial in trials)
    for trial in trials:
        whole, early = trial.telemetry["num_steps"] == 100, "stopped_early" in trial.telemetry
        assert whole or early
    assert any("stopped_early" in trial.telemetry for trial in trials)
