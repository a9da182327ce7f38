"""Trials ended by the budget of a study continue after it was raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.worker_process import begin, evaluate, result, study, worker_on

from hpo.config.study_config import StudyConfig
from hpo.outcome import Outcome
from hpo.study.checkpoints.keep_best import keep_best_checkpoints
from hpo.study.claims.budget import StudyBudget
from hpo.study.reading.reader import read_study
from hpo.study.sampling.promotion import promotion_of
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import BUDGET_SPENT, create_or_resume_study

PRUNER = {"name": "promote", "starts": 0.1, "keep": 1}


def config_of(hours: float | None) -> StudyConfig:
    return study(50, pruner=PRUNER, **({} if hours is None else {"budget": {"hours": hours}}))


def worker_of(storage: Storage, config: StudyConfig) -> Any:
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    budget = StudyBudget(config.name, promotion) if config.budget else None
    return worker_on(storage, config, promotion=promotion, budget=budget)


@pytest.fixture
def url(storage: Storage) -> str:
    """A study with a spent budget: trial 0 paused, and trial 1 stopped after an evaluation."""
    with worker_of(storage, config_of(1.0)) as worker:
        for number in (0, 1):
            lease, trial = begin(worker)
            trial.suggest_float("x", 0.0, 1.0)
            lease.store_params()
            evaluate(storage, trial, 1, 0.5 + number)
            if number == 0:
                lease.pause(0.1, [0.5])
            worker.record_outcome(lease, result("paused", reason=BUDGET_SPENT))
        storage.write(lambda it: it.execute(sa.update(claims).values(device_seconds=3600.0)))
        assert worker.claim() is None
    return storage.url


@pytest.mark.parametrize("hours", [9.0, None])
def test_trials_continue_after_a_budget_is_raised(url: str, hours: float | None, tmp_path: Path) -> None:
    with open_storage(url) as storage:
        assert storage.is_finished("tiny")
        trials = read_study(storage, "tiny").trials
        assert [trial.state for trial in trials] == ["PRUNED", "PRUNED"]
        assert [trial.reason for trial in trials] == [BUDGET_SPENT, BUDGET_SPENT]
        for number in (0, 1):
            (tmp_path / f"trial-{number:05d}").mkdir()
        keep_best_checkpoints(storage.load_study("tiny"), tmp_path, 0)
        assert len([*tmp_path.glob("trial-*")]) == 2, "they may continue"
    with open_storage(url) as storage:
        config = config_of(hours)
        create_or_resume_study(storage, config)
        record = read_study(storage, "tiny")
        assert [trial.outcome for trial in record.trials] == [Outcome.PAUSED, Outcome.PREEMPTED]
        assert [len(trial.evaluations) for trial in record.trials] == [1, 1], "each keeps its curve"
        assert record.counts == {"open": 49, "running": 0, "done": 0, "paused": 1}
        with worker_of(storage, config) as worker:
            lease, trial = begin(worker)
            assert trial.number == 1, "the stopped trial continues"
            evaluate(storage, trial, 2, 0.9)
            worker.record_outcome(lease, result("complete", values=(0.9,)))
        (_, complete) = read_study(storage, "tiny").trials
        assert complete.values == (0.9,)
        assert len(complete.evaluations) == 2
