"""A process that lost its CUDA context: its trials go on in a new process, and none of them is blamed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.lost_gpu import WAIT_FOR_THE_DEVICE, LostGpu
from support.tiny import tiny_executor, write_study

import hpo
from hpo.errors import DeviceLostError
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
