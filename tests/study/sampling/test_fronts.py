"""Which paused trials of several objectives go on, and what samplers see of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial
from worker_process import study

from hpo.config.search_space import suggest
from hpo.study.sampling.fronts import order, pareto_front
from hpo.study.sampling.promotion import ORIGIN_ATTR, PAUSED_ATTR, RESUMED_ATTR, Promotion
from hpo.study.sampling.samplers import build_sampler

DIRECTIONS = ("maximize", "minimize")
RATE = optuna.distributions.FloatDistribution(0.0001, 0.9)
SPACE = {"learning_rate": {"type": "float", "low": 0.0001, "high": 0.9}}
VALUES = [(0.1, 1.0), (0.3, 2.0), (0.2, 3.0), (0.5, 4.0), (0.4, 5.0), (0.9, 7.0), (0.8, 9.0)]
"""The first front: 0, 1, 3 and 5; the second: 2, 4 and 6."""


def trial_of(number: int, values: tuple[float, float], rate: float = 0.1, **attributes: Any) -> FrozenTrial:
    """One that has paused; one that goes on has ended."""
    state = TrialState.COMPLETE if ORIGIN_ATTR in attributes else TrialState.PRUNED
    attributes = {"outcome": "pruned", PAUSED_ATTR: 0.1, **attributes}
    kinds, params = {"learning_rate": RATE}, {"learning_rate": rate}
    trial = create_trial(
        state=state, values=values, params=params, distributions=kinds, user_attrs=attributes
    )
    trial.number = number
    return trial


STARTS = [trial_of(number, values) for number, values in enumerate(VALUES)]
OUTSIDE = trial_of(7, (1.0, 0.5))
OUTSIDE.set_constraint("memory", 0.5)
GONE = [trial_of(7 + i, (1.0, 1.0), **{RESUMED_ATTR: 0.1, ORIGIN_ATTR: i}) for i in (5, 0)]


def test_a_front_is_whole_before_the_next_begins() -> None:
    losses_NK = np.random.default_rng(0).integers(0, 12, size=(200, 3)).astype(float)
    left = losses_NK[order(losses_NK)]
    while len(left):
        front = pareto_front(left, ("minimize",) * 3)
        assert front[: front.sum()].all()
        left = left[front.sum() :]


@pytest.mark.parametrize(
    ("trials", "unfinished", "going_on"),
    [
        (STARTS, {*range(7), None}, [5, 0]),  # others are to come: two of seven, the ends of the front
        (STARTS[:2], {0, 1}, [1, 0]),  # all have begun: the whole front, though `keep` is 1
        ([*STARTS, *GONE], {1, 2, 3, 4, 6}, [3, 1]),
        ([*STARTS, OUTSIDE], {*range(8)}, [5, 0]),  # which is better than all, and breaks a limit
    ],
)
def test_who_goes_on(trials: list[FrozenTrial], unfinished: set[int | None], going_on: list[int]) -> None:
    assert Promotion((0.1,), 3, 1, DIRECTIONS, num_trials=16).going_on(trials, unfinished) == going_on


def test_a_trial_whose_place_may_still_get_better_is_not_given_up() -> None:
    """Seven are before 7, and none beats it: it is on their front, between two that are near."""
    starts = [*STARTS, trial_of(7, (0.31, 2.01)), *(trial_of(8 + i, (0.05, 9.0 + i)) for i in range(8))]
    promotion = Promotion((0.1,), 9, 1, DIRECTIONS, num_trials=16)
    assert promotion.hopeless(starts, {*range(16), None}) == {*range(8, 16)}


def study_of(trials: list[FrozenTrial]) -> optuna.Study:
    made = optuna.create_study(directions=DIRECTIONS)
    made.add_trials(trials)
    return made


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_samplers_learn_from_paused_trials(sampler: str) -> None:
    """The first fifteen are bad; all are PRUNED, which TPE by itself would take for equals in their order."""
    bad = [trial_of(i, (0.1, 9.0), 0.8 + i / 200) for i in range(15)]
    good = [trial_of(i, (0.5 + i / 100, 1.0 + i / 100), 0.1 + i / 200) for i in range(15)]
    config, known = study(30, sampler={"name": sampler}, search_space=SPACE), study_of([*bad, *good])
    known.sampler = build_sampler(config.sampler, config.search_space, explores=True)
    rates = []
    for _ in range(30):
        trial = known.ask()
        rates.append(suggest(config.search_space, trial)["learning_rate"])
        known.tell(trial, state=TrialState.FAIL)
    assert sum(rate < 0.45 for rate in rates) > 18, "half of them are drawn at random"
