"""Points of a grid, each for one trial, also where connections break."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
from optuna.storages import RDBStorage
from planted_comparison import plan_of
from sqlalchemy.exc import OperationalError
from worker_process import begin, result, study

from hpo.compare.companion import comparison_study
from hpo.config.search_space import suggest
from hpo.study.claims.leases import WorkerLease
from hpo.study.sampling.grid_sampler import POINT_ATTR, PlannedPoints
from hpo.study.sampling.samplers import build_sampler
from hpo.study.store.optuna_internals import trial_id_of
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

GRID = study(
    4,
    sampler={"name": "grid", "seed": 1},
    search_space={
        "batch_size": {"type": "categorical", "choices": [8, 16]},
        "pooling": {"type": "categorical", "choices": ["cls", "mean"]},
    },
)


PLAN = plan_of(2)
COMPARISON = comparison_study(study(1), PLAN, has_test=False).with_values(name="tiny")


@pytest.fixture(params=[GRID, COMPARISON], ids=["grid", "comparison"])
def config(request: pytest.FixtureRequest) -> Any:
    """A study of four points."""
    return request.param


@pytest.fixture
def worker(storage: Storage, config: Any) -> Any:
    opened = create_or_resume_study(storage, config)
    storage.patience_seconds = 1.0  # it tries again the sooner
    if config is GRID:
        opened.sampler = build_sampler(config.sampler, config.search_space)
    else:
        opened.sampler = PlannedPoints(lambda: PLAN, nullcontext)
    with WorkerLease(storage, opened, max_retries=1) as worker:
        yield worker


def run_one(worker: WorkerLease, config: Any) -> None:
    lease, trial = begin(worker)
    suggest(config.search_space, trial)
    worker.record_outcome(lease, trial, result("complete"))


def points(storage: Storage) -> list[str]:
    with open_storage(storage.url) as other:
        return [str(trial.params) for trial in other.load_study("tiny").trials]


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_point_whose_connection_broke_is_given_once(
    storage: Storage, worker: WorkerLease, config: Any, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    store, breaks = RDBStorage.set_trial_system_attr, iter([True, False, True])

    def broken(self: Any, trial_id: int, key: str, value: Any) -> None:
        is_broken = key == POINT_ATTR and next(breaks, False)
        if is_stored or not is_broken:
            store(self, trial_id, key, value)
        if is_broken:
            raise OperationalError("cut", None, Exception("connection lost"))

    monkeypatch.setattr(RDBStorage, "set_trial_system_attr", broken)
    for _ in range(4):
        run_one(worker, config)
    assert max(Counter(points(storage)).values()) == 1


def test_a_point_that_two_workers_chose_is_given_up_by_one(
    storage: Storage, worker: WorkerLease, config: Any
) -> None:
    """The lock under which points are chosen is lost with the connection."""
    run_one(worker, config)
    lease, trial = begin(worker)
    first = worker._study.trials[0].system_attrs[POINT_ATTR]
    storage.optuna.set_trial_system_attr(trial_id_of(trial), POINT_ATTR, first)
    worker.release(lease)
    for _ in range(3):
        run_one(worker, config)
    assert max(Counter(points(storage)).values()) == 1
