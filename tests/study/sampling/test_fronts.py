"""Which paused trials of several objectives go on, and what samplers see of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial
from worker_process import study

from hpo.config.search_space import suggest
from hpo.study.sampling.fronts import num_better, order, pareto_front
from hpo.study.sampling.gp_sampler import _with_pruned
from hpo.study.sampling.promotion import ORIGIN_ATTR, PAUSED_ATTR, RESUMED_ATTR, Promotion
from hpo.study.sampling.samplers import build_sampler

DIRECTIONS = ("maximize", "minimize")
"""Of a score and of memory."""
SPACE = {"learning_rate": {"type": "float", "low": 0.0001, "high": 0.9}}
STEP = [(0.1, 1), (0.3, 2), (0.2, 3), (0.5, 4), (0.4, 5), (0.9, 7), (0.8, 9)]
"""The first front: 0, 1, 3 and 5; the second: 2, 4 and 6."""


def paused(number: int, values: tuple[float, float], rate: float = 0.1, **attributes: Any) -> FrozenTrial:
    trial = create_trial(
        state=TrialState.PRUNED,
        values=list(values),
        params={"learning_rate": rate},
        distributions={"learning_rate": optuna.distributions.FloatDistribution(0.0001, 0.9)},
        user_attrs={"outcome": "pruned", PAUSED_ATTR: 0.1, **attributes},
    )
    trial.number = number
    return trial


STARTS = [paused(number, values) for number, values in enumerate(STEP)]


def test_whole_fronts_go_first_and_of_each_the_ends() -> None:
    losses_NK = np.array(STEP) * (-1, 1)
    assert order(losses_NK).tolist() == [5, 0, 3, 1, 6, 2, 4]


def test_the_order_is_that_of_dominance_alone() -> None:
    generator = np.random.default_rng(0)
    losses_NK = generator.integers(0, 12, size=(200, 3)).astype(float)
    left, place = losses_NK[order(losses_NK)], 0
    while place < len(left):
        front = pareto_front(left[place:], ("minimize",) * 3)
        assert front[: front.sum()].all(), "a front is whole before the next begins"
        place += front.sum()
    better = [num_better(losses_NK, row) for row in range(200)]
    assert [one == 0 for one in better] == pareto_front(losses_NK, ("minimize",) * 3).tolist()


@pytest.mark.parametrize(
    ("num_begun", "unfinished", "going_on"),
    [
        (7, {*range(7), None}, [5, 0]),  # others are to come: two of seven
        (7, {*range(7)}, [5, 0]),
        (2, {0, 1}, [1, 0]),  # the whole front, though `keep` is 1
    ],
)
def test_the_first_front_goes_on_when_all_have_begun(
    num_begun: int, unfinished: set[int | None], going_on: list[int]
) -> None:
    promotion = Promotion((0.1,), 3, 1, DIRECTIONS, num_trials=16)
    assert promotion.going_on(STARTS[:num_begun], unfinished) == going_on
    if num_begun == 7 and None not in unfinished:
        gone = [paused(7 + i, (1.0, 1.0), **{RESUMED_ATTR: 0.1, ORIGIN_ATTR: i}) for i in (5, 0)]
        for trial in gone:
            trial.state = TrialState.COMPLETE
        assert promotion.going_on([*STARTS, *gone], unfinished - {0, 5}) == [3, 1]


def test_a_trial_whose_place_may_still_get_better_is_not_given_up() -> None:
    """Seven are before 7, and none beats it: it is on their front, between two that are near."""
    starts = [*STARTS, paused(7, (0.31, 2.01)), *(paused(8 + i, (0.05, 9.0 + i)) for i in range(8))]
    hopeless = Promotion((0.1,), 9, 1, DIRECTIONS, num_trials=16).hopeless(starts, {*range(16), None})
    assert hopeless == {*range(8, 16)}


def test_limits_go_before_fronts() -> None:
    outside = paused(7, (1.0, 0.5))
    outside.set_constraint("memory", 0.5)
    promotion = Promotion((0.1,), 2, 1, DIRECTIONS, num_trials=16)
    going_on = promotion.going_on([*STARTS, outside], {*range(8), None})
    assert going_on == [5, 0, 3, 1], "though 7 is better than all"


def study_of(trials: list[FrozenTrial]) -> optuna.Study:
    made = optuna.create_study(directions=DIRECTIONS)
    made.add_trials(trials)
    return made


def test_a_trial_is_shown_as_of_its_first_rung_whatever_it_came_to() -> None:
    ended = paused(2, (0.2, 1.0), **{RESUMED_ATTR: 0.1, ORIGIN_ATTR: 0})
    ended.state = TrialState.COMPLETE
    shown = _with_pruned(study_of([STARTS[0], STARTS[1], ended]))
    assert [(trial.state.name, trial.values) for trial in shown] == [
        ("COMPLETE", [0.1, 1]),
        ("COMPLETE", [0.3, 2]),
    ]


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_samplers_learn_from_paused_trials(sampler: str) -> None:
    """The first fifteen are bad; all are PRUNED, which TPE by itself would take for equals in their order."""
    bad = [paused(i, (0.1, 9.0), 0.8 + i / 200) for i in range(15)]
    good = [paused(i, (0.5 + i / 100, 1.0 + i / 100), 0.1 + i / 200) for i in range(15)]
    config = study(30, sampler={"name": sampler}, search_space=SPACE)
    known = study_of([*bad, *good])
    known.sampler = build_sampler(config.sampler, config.search_space, explores=True)
    rates = []
    for _ in range(30):
        trial = known.ask()
        rates.append(suggest(config.search_space, trial)["learning_rate"])
        known.tell(trial, state=TrialState.FAIL)
    assert sum(rate < 0.45 for rate in rates) > 18, "half of them are drawn at random"
