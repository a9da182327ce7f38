import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from support.worker_process import evaluate, result, study

from hpo.config.search_space import suggest
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running.worker import run_worker
from hpo.study.sampling.forecast import (
    Cost,
    Measured,
    Stage,
    forecast,
    measured_cost,
    measured_trial,
    most_whole_trials,
    seconds_ahead,
    stages_left,
    training_share,
)
from hpo.study.sampling.promotion import (
    PAUSED_ATTR,
    RESUMED_ATTR,
    RUNGS_ATTR,
    Promotion,
    Rung,
    Standings,
    promotion_of,
)
from hpo.study.store.storage import Storage
from hpo.study.store.studies import BUDGET_SPENT, create_or_resume_study

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


PROMOTION = Promotion((0.1, 0.3), reduction_factor=3, keep=1, directions=("maximize",), num_trials=9)


@pytest.mark.parametrize(
    ("attributes", "is_complete", "num_runs", "trained"),
    [
        ({}, False, 1, 0.1),
        ({"paused_at": 0.1}, False, 1, 0.1),
        ({"paused_at": 0.1, "resumed_at": 0.1}, False, 2, 0.3),
        ({"paused_at": 0.3, "resumed_at": 0.3}, False, 3, 1.0),
        ({"paused_at": 0.3, "resumed_at": 0.3}, True, 3, 1.0),
        ({"paused_at": 0.1, "resumed_at": 0.1, "outcome_reason": BUDGET_SPENT}, False, None, None),
    ],
)
def test_the_measured_cost_of_a_trial(
    attributes: dict[str, Any], is_complete: bool, num_runs: int | None, trained: float | None
) -> None:
    """A broken trial counts as if it had reached the next rung."""
    rungs = {str(rung): {} for rung in (0.1, 0.3) if rung <= attributes.get("paused_at", 0.0)}
    measured = measured_trial(PROMOTION, {**attributes, "rungs": rungs}, is_complete, (9.0, 6.0))
    assert measured == (None if num_runs is None else Measured(9.0, 6.0, num_runs, trained))


def test_the_mean_cost_of_trials() -> None:
    """The setup and the evaluation of a run cost 2 seconds, the training of a whole trial 12."""
    cost = Cost(run_seconds=2.0, training_seconds=12.0)
    assert measured_cost([Measured(10.0, 6.0, 2, 0.5), Measured(5.0, 3.0, 1, 0.25)]) == cost
    assert cost.of_trial(3, 0.5) == 3 * 2 + 6
    assert cost.of([Stage(0.0, 0.25, 5), Stage(0.25, 1.0, 2)]) == 5 * (2 + 3) + 2 * (2 + 9)
    assert measured_cost([]) is None
    assert measured_cost([Measured(4.0, 0.0, 1, 0.0)]) is None, "nothing was trained"


@pytest.mark.parametrize(
    ("training", "active", "share"), [(3.0, 4.0, 0.75), (5.0, 4.0, 1.0), (None, 4.0, 1.0), (3.0, 0.0, 1.0)]
)
def test_the_share_of_training_is_at_most_one(training: float | None, active: float, share: float) -> None:
    assert training_share(training, active) == share


@pytest.mark.parametrize(("spent", "ahead"), [(3.0, 0.0), (5.0, 1.0), (99.0, 3.0 + 0.2 * 10)])
def test_seconds_of_the_present_run_end_at_its_expected_total(spent: float, ahead: float) -> None:
    """The first rung is worth 4 seconds, and the next one 5 more."""
    attributes = {"paused_at": 0.1, "rungs": {"0.1": {}}}
    assert seconds_ahead(PROMOTION, Cost(3.0, 10.0), attributes, spent) == pytest.approx(ahead)


COST = Cost(0.1, 0.2)


@pytest.mark.parametrize(
    ("cost", "seconds", "num_starts", "num_new"),
    [
        (COST, 0.9, 0, 3),  # a rounding error less than three trials
        (COST, 0.89, 0, 2),
        (COST, 0.9, 2, 1),
        (COST, 99.0, 0, 5),
        (None, 0.0, 0, 1),
        (COST, None, 0, 5),
    ],
)
def test_trials_begin_within_the_seconds_left(
    cost: Cost | None, seconds: float | None, num_starts: int, num_new: int
) -> None:
    found = forecast(None, [], num_starts, 5, cost, seconds)
    assert (found.num_new, found.whole_trials) == (num_new, num_starts + num_new)
    assert forecast(None, [], num_starts, 0, cost, seconds).num_new == 0


def trained_by_one_worker(promotion: Promotion, results: list[int]) -> float:
    """Run a study with these results by the rule of its workers; return its training in whole trials."""
    trials: list[Any] = []
    trained = 0.0
    while True:
        standings = Standings(promotion)
        for trial in trials:
            if trial.state.name == "COMPLETE":
                standings.add_ended(trial)
        paused = [trial for trial in trials if trial.state.name == "RUNNING"]
        rungs = standings.rungs(paused, lambda _: True)
        if chosen := standings.promoted(rungs, more_begin=len(trials) < len(results)):
            trial = trials[chosen[0]]
            trial.user_attrs[RESUMED_ATTR] = trial.user_attrs[PAUSED_ATTR]
        elif len(trials) < len(results):
            trial = SimpleNamespace(number=len(trials), state=SimpleNamespace(name="RUNNING"), user_attrs={})
            trials.append(trial)
        else:
            return trained
        attributes, begin = trial.user_attrs, trial.user_attrs.get(RESUMED_ATTR, 0.0)
        end = next((rung for rung in promotion.used if rung > begin), 1.0)
        trained += end - begin
        if end == 1.0:
            trial.state.name = "COMPLETE"
        else:
            at = {"values": [results[trial.number]], "constraints": {}}
            attributes |= {PAUSED_ATTR: end, RUNGS_ATTR: attributes.get(RUNGS_ATTR, {}) | {str(end): at}}


@pytest.mark.parametrize(("rungs", "factor", "keep"), [((0.1,), 3, 1), ((0.05, 0.25), 3, 2)])
def test_most_training_by_the_order_of_results(rungs: tuple[float, ...], factor: int, keep: int) -> None:
    promotion, draw, num = Promotion(rungs, factor, keep, ("minimize",), 24), random.Random(1), 24
    planned = sum(stage.whole_trials for stage in stages_left(promotion, [Rung()] * len(rungs), num))
    most = most_whole_trials(promotion, num)
    assert trained_by_one_worker(promotion, [*range(num)]) == pytest.approx(planned)
    found = [trained_by_one_worker(promotion, draw.sample(range(num), num)) for _ in range(60)]
    assert planned < most
    assert sum(one <= most + 1e-9 for one in found) / 60 + 0.15 >= 1  # of 95 % expected, at least 85 %
    assert max(found) > planned
