"""The agreement of a study with its forecast."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import optuna
import pytest
from support.worker_process import evaluate, result, study

from hpo.config.search_space import suggest
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running.worker import run_worker
from hpo.study.sampling.forecast import Cost, Stage, forecast
from hpo.study.sampling.promotion import RESUMED_ATTR, Rung, promotion_of
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

EARLY = {"name": "promote", "starts": 0.1, "keep": 1}
TRAINING_SECONDS = 20.0


@pytest.mark.parametrize("pruner", [{"name": "none"}, {"name": "promote"}, EARLY])
@pytest.mark.parametrize(("run_seconds", "seconds"), [(0.0, 30.0), (2.0, 150.0), (6.0, 150.0)])
def test_a_study_follows_its_plan(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, pruner: Any, run_seconds: float, seconds: float
) -> None:
    """The first trial is the best, so that no trial is promoted after a better one."""
    config, cost = (
        study(1000, pruner=pruner, budget={"hours": seconds / 3600}),
        Cost(run_seconds, TRAINING_SECONDS),
    )
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    shares = sorted({*(promotion.used if promotion else ()), 0.5, 1.0})
    now = [0.0]  # moves only with training

    def train(trial: optuna.trial.Trial, lease: Lease) -> Any:
        suggest(config.search_space, trial)
        lease.store_params()
        resumed_at = before = trial.user_attrs.get(RESUMED_ATTR, 0.0)
        now[0] += run_seconds
        value = -float(trial.number)
        for index, share in enumerate(shares):
            if share <= resumed_at:
                continue
            now[0] += (share - before) * TRAINING_SECONDS
            before = share
            evaluate(storage, trial, index, value, seconds=share * TRAINING_SECONDS)
            if promotion and (rung := promotion.pauses_at(share, resumed_at)):
                lease.pause(rung, [value])
                return result("paused")
            if share < 1.0 and lease.is_budget_spent():
                return result("paused")
        return result("complete", values=(value,))

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    create_or_resume_study(storage, config)
    assert run_worker(config, storage, train).ended == "finished"
    record = read_study(storage, config.name)
    rungs = [Rung() for _ in promotion.rungs] if promotion else []
    stages = forecast(promotion, rungs, 0, config.num_trials, cost, seconds).stages
    paused = Counter(rung for trial in record.trials for rung in trial.attributes.get("rungs", {}))
    complete = sum(trial.outcome == "complete" for trial in record.trials)
    began = [len(record.trials), *(paused[str(stage.end)] for stage in stages[1:-1]), complete]
    expected = [stage.num_trials for stage in stages]
    assert (began if len(stages) > 1 else [complete]) == pytest.approx(expected, abs=1)
    spent = sum(record.spent.values())
    assert seconds - cost.of([Stage(0.0, 1.0, 2)]) <= spent <= seconds + cost.of([Stage(0.0, 0.5, 1)])
