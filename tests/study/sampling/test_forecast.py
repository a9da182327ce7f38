"""The planner, and the agreement of studies with their forecast."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import optuna
import pytest
from support.worker_process import evaluate, result, study

from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.running.worker import run_worker
from hpo.study.sampling.forecast import Cost, Stage, forecast
from hpo.study.sampling.promotion import RESUMED_ATTR, Rung, promotion_of
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

PRUNERS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "promote": {"name": "promote"},
    "early": {"name": "promote", "starts": 0.1, "keep": 1},
}
COST = Cost(run_seconds=2.0, training_seconds=20.0)


@dataclass
class FakeTime:
    """A clock that moves only with training."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(time, "monotonic", fake)
    return fake


def config_of(pruner: str, seconds: float, n_trials: int = 1000, **changes: Any) -> StudyConfig:
    return study(n_trials, pruner=PRUNERS[pruner], budget={"hours": seconds / 3600}, **changes)


def run(storage: Storage, config: StudyConfig, clock: FakeTime, cost: Cost = COST) -> StudyRecord:
    """Run a study with this cost of a trial. A lower number is a better trial."""
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    shares = sorted({*(promotion.used if promotion else ()), 0.5, 1.0})

    def train(trial: optuna.trial.Trial, lease: Lease) -> Any:
        suggest(config.search_space, trial)
        lease.store_params()
        resumed_at = before = trial.user_attrs.get(RESUMED_ATTR, 0.0)
        clock.now += cost.run_seconds
        for index, share in enumerate(shares):
            if share <= resumed_at:
                continue
            clock.now += (share - before) * cost.training_seconds
            before, trained = share, share * cost.training_seconds
            evaluate(storage, trial, index, -float(trial.number), seconds=trained)
            if share == 1.0:
                return result("complete", values=(-float(trial.number),))
            if promotion and (rung := promotion.pauses_at(share, resumed_at)):
                lease.pause(rung, [-float(trial.number)])
                return result("paused")
            if lease.is_budget_spent():
                return result("paused")
        raise AssertionError

    create_or_resume_study(storage, config)
    assert run_worker(config, storage, train).ended == "finished"
    return read_study(storage, config.name)


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize(("run_seconds", "seconds"), [(0.0, 30.0), (2.0, 150.0), (6.0, 150.0)])
def test_a_study_follows_its_plan(
    storage: Storage, clock: FakeTime, pruner: str, run_seconds: float, seconds: float
) -> None:
    """The first trial is the best, so that no trial is promoted after a better one."""
    config, cost = config_of(pruner, seconds), Cost(run_seconds, 20.0)
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    rungs = [Rung() for _ in promotion.rungs] if promotion else []
    stages = forecast(promotion, rungs, 0, config.num_trials, cost, seconds).stages
    record = run(storage, config, clock, cost)
    paused = Counter(rung for trial in record.trials for rung in trial.attributes.get("rungs", {}))
    complete = sum(trial.outcome == "complete" for trial in record.trials)
    began = [len(record.trials), *(paused[str(stage.end)] for stage in stages[1:-1]), complete]
    if len(stages) == 1:
        began = [complete]
    assert began == pytest.approx([stage.num_trials for stage in stages], abs=1)
    spent = sum(record.spent.values())
    assert seconds - cost.of([Stage(0.0, 1.0, 2)]) <= spent <= seconds + cost.of([Stage(0.0, 0.5, 1)])
