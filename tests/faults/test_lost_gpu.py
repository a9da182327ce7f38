"""A process that lost its CUDA context: its trials go on in a new process, and none of them is blamed."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from support.command_line import FAULTY_HPO, PYTHON_PATH, hpo_command
from support.lost_gpu import WAIT_FOR_THE_DEVICE, LostGpu
from support.tiny import tiny_executor, write_study

import hpo
from hpo.errors import DeviceLostError
from hpo.study.running import supervisor
from hpo.study.store.storage import open_storage


def outcomes(study: hpo.Study) -> Counter[str]:
    return Counter(trial.outcome or trial.state for trial in study.record.trials)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hpo.Study:
    monkeypatch.chdir(tmp_path)
    training = {"max_steps": 2, "batch_size": 8, "max_length": 32}
    return hpo.Study(write_study(tmp_path, n_trials=3, training=training), quiet=True)


def test_a_lost_context_ends_the_run_and_no_trial_fails(
    study: hpo.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the process stays: it must not claim the next trials one after the other."""
    gpu = LostGpu(monkeypatch.setattr, "step", at=3)  # in the second trial
    for message in ("illegal memory access", "any more", "any more"):
        with pytest.raises(DeviceLostError, match=rf"{message}.*Start a new process"):
            study.run()
    assert outcomes(study) == {"complete": 1, "preempted": 1}
    gpu.start_new_process()
    assert study.run().outcomes == {"complete": 2}
    assert outcomes(study) == {"complete": 3}


def test_three_lost_contexts_in_a_row_end_the_trial_as_crashed(
    study: hpo.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        with monkeypatch.context() as patches:
            LostGpu(patches.setattr, "step", at=1)
            with pytest.raises(DeviceLostError):
                study.run()
    assert study.run().outcomes == {"crashed": 1, "complete": 2}
    [crashed] = [trial for trial in study.record.trials if trial.outcome == "crashed"]
    assert crashed.reason == "its process died 3 times before its first checkpoint, without progress."


def test_a_context_lost_after_the_training_is_no_failure_of_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There its error would end the trial as `failed`: no score on test."""
    monkeypatch.chdir(tmp_path)
    study = hpo.Study(write_study(tmp_path, n_trials=1, evaluation={"test": True}), quiet=True)
    gpu = LostGpu(monkeypatch.setattr, "scores on test", at=1)
    with pytest.raises(DeviceLostError):
        study.run()
    assert outcomes(study) == {"preempted": 1}
    gpu.start_new_process()
    assert study.run().outcomes == {"complete": 1}


@pytest.mark.parametrize("place", [place for place in WAIT_FOR_THE_DEVICE if place != "scores on test"])
def test_nothing_hides_a_lost_context(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Wherever it shows first; the compatibility check stores no verdict on the precision."""
    gpu = LostGpu(monkeypatch.setattr, place, at=1)
    with open_storage(sqlite_url) as storage:
        executor = tiny_executor(tmp_path)
        executor.cache = storage
        with pytest.raises(DeviceLostError, match="illegal memory access"):
            executor.run({"fp_precision": "bf16"}, tmp_path / "trial", "test")
        gpu.start_new_process()
        result = executor.run({"fp_precision": "bf16"}, tmp_path / "trial", "test")
    assert result.outcome == "complete"


def test_a_context_lost_while_a_plan_is_measured_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_study(tmp_path, budget={"hours": 0.5}, pruner={"name": "promote", "starts": 0.1, "keep": 1})
    LostGpu(monkeypatch.setattr, "step", at=1)
    finished = hpo_command(tmp_path, "plan", "tiny.yaml")
    assert (finished.exit_code, "Error: this process cannot use the" in finished.err) == (1, True)


@pytest.mark.slow
def test_a_supervisor_starts_another_worker(
    study: hpo.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    command = [sys.executable, FAULTY_HPO, "lost", "worker"]
    monkeypatch.setattr(supervisor, "worker_command", lambda study, *_: [*command, study])
    result = study.run(workers_per_device=1)
    assert (tmp_path / "lost").exists()
    assert (result.ended, result.exit_code, result.outcomes) == ("finished", 0, {"complete": 3})
    [log] = tmp_path.glob("runs/tiny/worker-*.log")
    assert log.read_text().count("--- a worker starts") == 2
    assert "Error: " in log.read_text()
