"""The cost of a precision that never works.

A learning sampler must avoid it. With another sampler, its trials must end before their training.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support import worker_process
from support.tiny import CPU, ENCODER, tiny_study

from hpo.config.resolved_study import resolve_study
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import TrialRunner, run_worker
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study
from hpo.trial.executor import Executor


@pytest.mark.slow
def test_learning_sampler_with_four_workers(storage_url: str, tmp_path: Path) -> None:
    """Workers do not see running trials of others, and may all try the same in a row."""
    config = worker_process.study(100, sampler={"name": "tpe"})
    workers = [worker_process.start(storage_url, config, tmp_path / "log") for _ in range(4)]
    worker_process.finish(*workers, seconds=200)
    with open_storage(storage_url) as storage:
        outcomes = Counter(trial.outcome for trial in read_study(storage, "tiny").trials)
    assert outcomes["nonfinite"] <= 15


def test_random_sampler(sqlite_url: str, tmp_path: Path) -> None:
    """fp16 overflows in this encoder, and no CPU has TF32."""
    config = tiny_study(
        tmp_path,
        n_trials=12,
        sampler={"name": "random", "seed": 3},
        model={"encoder": ENCODER | {"initializer_range": 300.0}},
        search_space={"fp_precision": {"type": "categorical", "choices": ["fp32", "fp16", "tf32"]}},
        training={"max_steps": 2, "batch_size": 8, "max_length": 64},
    )
    with open_storage(sqlite_url) as storage:
        executor = Executor(resolve_study(config, CPU), tmp_path / "runs", storage)
        create_or_resume_study(storage, config)
        run_worker(config, storage, TrialRunner(executor, storage, Stop()))
        trials = read_study(storage, config.name).trials
    outcomes = Counter((trial.params["fp_precision"], trial.outcome) for trial in trials)
    assert set(outcomes) == {("fp32", "complete"), ("fp16", "incompatible"), ("tf32", "unsupported")}
    assert outcomes["fp16", "incompatible"] >= 2
    assert outcomes["tf32", "unsupported"] >= 2
    trained = [trial for trial in trials if trial.telemetry.get("num_steps")]
    assert len(trained) == outcomes["fp32", "complete"], "no broken trial has trained"
    checks = [trial.telemetry["compatibility"] for trial in trials if "compatibility" in trial.telemetry]
    assert len([check for check in checks if not check["cached"]]) == 2, "one check of fp32, one of fp16"
