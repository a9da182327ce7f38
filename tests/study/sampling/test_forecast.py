"""The planner, and whether a study does what it forecast."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from support.worker_process import evaluate, result, study

from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.report.messages import budget_messages
from hpo.report.plan import TrialCost, make_plan
from hpo.report.status import study_status
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.running.worker import run_worker
from hpo.study.sampling.forecast import Cost, Stage, forecast, planned_stages
from hpo.study.sampling.promotion import RESUMED_ATTR, Rung, Standings, promotion_of
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
    """A clock that stands still while nothing is trained."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(time, "monotonic", fake)
    return fake


def config_of(pruner: dict[str, Any], seconds: float, n_trials: int = 1000) -> StudyConfig:
    return study(n_trials, pruner=pruner, budget={"hours": seconds / 3600})


def run(storage: Storage, config: StudyConfig, clock: FakeTime, cost: Cost) -> StudyRecord:
    """Run a study whose trials take so long. A trial is the better, the lower its number is."""
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


def planned(config: StudyConfig, cost: Cost) -> list[Stage]:
    """The stages of the study before it begins."""
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    rungs = [Rung() for _ in promotion.rungs] if promotion else []
    assert config.budget is not None
    return [*forecast(promotion, rungs, 0, config.num_trials, cost, config.budget.seconds).stages]


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("cost", [Cost(0.0, 20.0), COST, Cost(6.0, 20.0)], ids=["no setup", "", "long setup"])
@pytest.mark.parametrize("seconds", [30.0, 150.0])
def test_a_study_does_what_was_planned(
    storage: Storage, clock: FakeTime, pruner: str, cost: Cost, seconds: float
) -> None:
    """The first trial is the best, so that no trial is promoted after a better one was."""
    config = config_of(PRUNERS[pruner], seconds)
    stages = planned(config, cost)
    record = run(storage, config, clock, cost)
    paused = Counter(rung for trial in record.trials for rung in trial.attributes.get("rungs", {}))
    complete = sum(trial.outcome == "complete" for trial in record.trials)
    began = [len(record.trials), *(paused[str(stage.end)] for stage in stages[1:-1]), complete]
    if len(stages) == 1:
        began = [complete]
    assert began == pytest.approx([stage.num_trials for stage in stages], abs=1)
    spent = sum(record.spent.values())
    assert seconds - cost.of([Stage(0.0, 1.0, 2)]) <= spent <= seconds + cost.of([Stage(0.0, 0.5, 1)])


@pytest.mark.parametrize(("seconds", "num_published"), [(100.0, 1), (500.0, 3)])
def test_the_portfolio_gets_a_tenth_of_the_planned_starts(
    storage: Storage, clock: FakeTime, seconds: float, num_published: int
) -> None:
    """A budget is enough for 4 trials, or for 22. No trial waits after the end."""
    config = study(sampler={"name": "tpe"}, pruner=PRUNERS["none"], budget={"hours": seconds / 3600})
    config = config.with_values(n_trials=1000)
    record = run(storage, config, clock, COST)
    published = [trial for trial in record.trials if "portfolio" in trial.attributes.get("source", "")]
    assert len(published) == num_published
    assert {trial.state for trial in record.trials} == {"COMPLETE"}


def test_starts_are_mostly_setup() -> None:
    """25 starts to 4 % take much longer than a whole trial."""
    promotion = promotion_of(study(pruner=PRUNERS["promote"]).pruner, ("maximize",), 1000)
    stages = planned_stages(promotion, 25)
    assert [stage.num_trials for stage in stages] == [25, 18, 6, 2]
    assert COST.of(stages[:1]) == pytest.approx(25 * 2.0 + 20.0)


@pytest.mark.parametrize("pruner", ["none", "promote"])
def test_plan_status_and_run_agree_about_what_is_left(storage: Storage, clock: FakeTime, pruner: str) -> None:
    """After the end nothing is left to begin, and the reason why the budget is not spent is named."""
    config = config_of(PRUNERS[pruner], 75.0)
    record = run(storage, config, clock, COST)
    costs = [TrialCost("fp32", None, 22.0, "a test", run_seconds=2.0)]
    before, after = make_plan(config, costs, None, 1), make_plan(config, costs, record, 1)
    assert after.whole_trials == 0
    assert after.hours == after.spent_hours == pytest.approx(sum(record.spent.values()) / 3600)
    assert before.hours == pytest.approx(after.hours, abs=22.0 / 3600)
    status = study_status(record)
    assert status["estimated_end"] is None
    assert "are not spent, because one more trial, with" in status["budget"]["unspent"]
    assert status["budget"]["unspent"] in budget_messages(record)


@pytest.mark.parametrize(
    ("n_trials", "why"),
    [(2, "because all of the study's 2 trials have ended. Raise `n_trials`."), (9, "take")],
)
def test_a_study_says_why_its_budget_is_not_spent(
    storage: Storage, clock: FakeTime, n_trials: int, why: str
) -> None:
    record = run(storage, config_of(PRUNERS["none"], 75.0, n_trials), clock, COST)
    assert why in study_status(record)["budget"]["unspent"]


def test_a_small_budget_is_enough_for_one_start(storage: Storage, clock: FakeTime) -> None:
    """Nothing was measured before the first trial, so a worker begins one. The plan says the same."""
    config = config_of(PRUNERS["none"], 5.0)
    plan = make_plan(config, [TrialCost("fp32", None, 22.0, "a test", run_seconds=2.0)], None, 1)
    assert [stage.num_trials for stage in plan.stages] == [1]
    assert "not be enough for one whole trial" in plan.text()
    assert len(run(storage, config, clock, COST).trials) == 1


def test_a_large_first_front_continues_as_planned() -> None:
    """None of 60 trials is better in both objectives than another. As many continue as the plan says."""
    promotion = promotion_of(study(pruner=PRUNERS["promote"]).pruner, ("minimize", "minimize"), 60)
    assert promotion is not None
    assert [stage.num_trials for stage in planned_stages(promotion, 60)] == [60, 20, 6, 4]
    standings, trials = Standings(promotion), []
    for number in range(60):
        values = {"values": [float(number), -float(number)], "constraints": {}}
        attributes = {"paused_at": 0.04, "rungs": {"0.04": values}}
        trials.append(create_trial(state=TrialState.RUNNING, user_attrs=attributes))
        trials[-1].number = number
    rungs = standings.rungs(trials, lambda _: True)
    assert len(standings.promoted(rungs, more_begin=False)) == 20
