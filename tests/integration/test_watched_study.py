"""The study `watched`: a callback and a sampler of the user's own code, and patience; killed and resumed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import yaml
from support.command_line import ROOT, finish, ok, saved_steps, start_hpo, stored, wait_until


@pytest.mark.slow
def test_the_study_is_killed_and_goes_on_with_two_workers(tmp_path: Path) -> None:
    example = ROOT / "studies" / "examples" / "watched"
    shutil.copy(example / "watched.py", tmp_path)
    study = yaml.safe_load((example / "study.yaml").read_text())
    study |= {"name": "tiny", "n_trials": 3, "checkpoint": {"every_seconds": 0.1}}
    study["training"] |= {"max_length": 32, "max_steps": 60}
    study["data"]["synthetic"] |= {"num_train": 48, "num_validation": 16, "num_test": 8}
    (tmp_path / "watched.yaml").write_text(yaml.safe_dump(study))
    process = start_hpo(tmp_path, "run", "watched.yaml")
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    ok(finish(start_hpo(tmp_path, "run", "watched.yaml", "--workers", "2")))
    trials = stored(tmp_path).trials
    assert [trial.outcome for trial in trials] == ["complete"] * 3
    assert all(trial.telemetry["callback_seconds"] > 0 for trial in trials)
    assert any("resumed_from_step" in trial.telemetry for trial in trials)
    for trial in trials:
        whole, early = trial.telemetry["num_steps"] == 60, "stopped_early" in trial.telemetry
        assert whole or early
    assert any("stopped_early" in trial.telemetry for trial in trials)
