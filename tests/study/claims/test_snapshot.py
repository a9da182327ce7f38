"""The trials of a study as a worker sees them."""

from __future__ import annotations

from typing import Any

import optuna
from worker_process import evaluate, result, study

from hpo.config.search_space import suggest
from hpo.study.claims.leases import Lease
from hpo.study.running.worker import WorkerOptions, run_worker
from hpo.study.sampling.promotion import RESUMED_ATTR, promotion_of
from hpo.study.store.storage import Storage


def test_paused_trials_whose_precision_has_broken_continue_last(storage: Storage) -> None:
    """All trials in fp16 are better than those in fp32 at the rung, and break behind it."""
    space = {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "fp16"]},
        "batch_size": {"type": "categorical", "choices": [1, 2, 3, 4]},
    }
    pruner = {"name": "promote", "starts": 0.5, "keep": 4, "reduction_factor": 9}
    config = study(8, sampler={"name": "grid"}, search_space=space, pruner=pruner)
    promotion = promotion_of(config.pruner, config.directions, 8)
    continued: list[str] = []

    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        params = suggest(config.search_space, trial)
        lease.store_params()
        precision, score = params["fp_precision"], params["batch_size"] / 10
        if trial.user_attrs.get(RESUMED_ATTR) is None:
            score += precision == "fp16"
            evaluate(storage, trial, value=score)
            rung = promotion.pauses_at(0.5, 0.0) if promotion else None
            assert rung is not None
            lease.pause(rung, [score])
            return result("paused")
        continued.append(precision)
        if precision == "fp16":
            facts = {"finite_in_fp32": True, "precision": {"effective": "fp16"}}
            return result("nonfinite", telemetry=facts)
        return result("complete", values=(score,))

    assert run_worker(config, storage, execute, WorkerOptions(poll_seconds=0.01)).ended == "finished"
    assert continued == ["fp16", "fp32", "fp32", "fp32", "fp32"]
