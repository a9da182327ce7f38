"""What a precision that never works costs a study.

Samplers that learn must not come back to it: at most 15 of 100 trials, also with several workers; each of
them alone is in test_samplers.py. With the others, its trials must end before they train, and after the first
without even a check.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import tiny, worker_process
from support.worker_process import study

from hpo.config.resolved_study import resolve_study
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import TrialRunner, run_worker
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study
from hpo.trial.executor import Executor

pytestmark = pytest.mark.slow


def test_learning_sampler_with_four_workers(storage_url: str, tmp_path: Path) -> None:
    """Workers do not see the trials that are running elsewhere end, and may all try the same in a row."""
    config = study(100, sampler={"name": "tpe"})
    workers = [worker_process.start(storage_url, config, tmp_path / "log") for _ in range(4)]
    for process in workers:
        process.join(200)
    with open_storage(storage_url) as storage:
        outcomes = Counter(trial.outcome for trial in read_study(storage, "tiny").trials)
    assert outcomes["nonfinite"] <= 15


@pytest.mark.parametrize("name", ["random", "grid", "qmc"])
def test_sampler_without_learning(sqlite_url: str, tmp_path: Path, name: str) -> None:
    """fp16 overflows in this encoder, and no CPU has TF32: both are tried again and again at little cost."""
    space: dict[str, Any] = {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "fp16", "tf32"]},
        "learning_rate": {"type": "float", "low": 0.001, "high": 0.004, "step": 0.001},
        "weight_decay": {"type": "float", "low": 0.0, "high": 0.1, "step": 0.1},
    }
    encoder = tiny.ENCODER | {"initializer_range": 300.0}
    config = tiny.tiny_study(
        tmp_path,
        n_trials=24,
        sampler={"name": name, "seed": 3},
        model={"encoder": encoder},
        search_space=space,
        training={"max_steps": 2, "batch_size": 8, "max_length": 64},
    )
    with open_storage(sqlite_url) as storage:
        executor = Executor(resolve_study(config, tiny.CPU), tmp_path / "runs", storage)
        create_or_resume_study(storage, config)
        stop = Stop()
        run_worker(config, storage, TrialRunner(executor, storage, stop))
        trials = read_study(storage, config.name).trials
    outcomes = Counter((trial.params["fp_precision"], trial.outcome) for trial in trials)
    assert set(outcomes) == {("fp32", "complete"), ("fp16", "incompatible"), ("tf32", "unsupported")}
    assert outcomes["fp16", "incompatible"] >= 2
    assert outcomes["tf32", "unsupported"] >= 2
    trained = [trial for trial in trials if trial.telemetry.get("num_steps")]
    assert len(trained) == outcomes["fp32", "complete"], "no broken trial has trained"
    checks = [trial.telemetry["compatibility"] for trial in trials if "compatibility" in trial.telemetry]
    assert len([check for check in checks if not check["cached"]]) == 2, "one check of fp32, one of fp16"
