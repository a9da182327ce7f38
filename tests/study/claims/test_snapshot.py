"""What a worker sees of the trials of a study. It refuses rows that hpo did not write."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from worker_process import begin, evaluate, result, study, worker_on

from hpo.config.search_space import suggest
from hpo.errors import StorageError
from hpo.study.claims.leases import Lease
from hpo.study.running.worker import WorkerOptions, run_worker
from hpo.study.sampling.promotion import PAUSED_ATTR, RESUMED_ATTR, RUNGS_ATTR, promotion_of
from hpo.study.store import optuna_internals
from hpo.study.store.storage import Storage

GOOD = {"values": [0.5], "constraints": {}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (PAUSED_ATTR, "soon"),
        (RESUMED_ATTR, None),
        (RUNGS_ATTR, [0.5]),
        (RUNGS_ATTR, {"now": GOOD}),
        (RUNGS_ATTR, {"0.1": {"values": ["good"], "constraints": {}}}),
        (RUNGS_ATTR, {"0.1": {"values": [0.5, 0.5], "constraints": {}}}),
        (RUNGS_ATTR, {"0.1": {"values": [0.5], "constraints": {"score": "low"}}}),
        (RUNGS_ATTR, {"0.1": {"values": [0.5]}}),
    ],
)
def test_a_changed_attribute_is_one_clear_error(storage: Storage, name: str, value: Any) -> None:
    with worker_on(storage, study(2)) as worker:
        lease, trial = begin(worker)
        worker.record_outcome(lease, result("preempted"))
        trial.set_user_attr(name, value)
        with pytest.raises(StorageError, match=f"`{name}` of trial 0 must be"):
            worker.claim()


def test_a_changed_trial_number_is_one_clear_error(storage: Storage) -> None:
    with worker_on(storage, study(3)) as worker:
        begin(worker)
        with storage.engine.begin() as connection:
            connection.execute(sa.update(optuna_internals.trials).values(number=2**40))
        with pytest.raises(StorageError, match="numbers from 0 to 1, but the last one has"):
            worker.claim()


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
