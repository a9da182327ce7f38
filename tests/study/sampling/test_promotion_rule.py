"""Which of the trials that have paused go on, from the trials alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.study.sampling.promotion import Promotion

PROMOTION = Promotion((0.1, 0.3), reduction_factor=3, keep=1, directions=("maximize",), num_trials=9)
"""At least three go on from the first rung, and one from the last."""


def study_of(*trials: tuple[float | None, float | None, int | None, float]) -> list[FrozenTrial]:
    """Trials by where they paused (1: they are complete; None: they broke), where before, whose start they go
    on from, and their value."""
    frozen = []
    for number, (paused_at, resumed_at, origin, value) in enumerate(trials):
        attrs: dict[str, Any] = {"outcome": "pruned"}
        attrs |= {} if paused_at in (1, None) else {"paused_at": paused_at}
        attrs |= {} if resumed_at is None else {"resumed_at": resumed_at, "origin": origin}
        state = TrialState.COMPLETE if paused_at == 1 else TrialState.PRUNED
        trial = create_trial(state=state, value=None if paused_at is None else value, user_attrs=attrs)
        trial.number = number
        frozen.append(trial)
    return frozen


STARTS = [(0.1, None, None, value) for value in (0.3, 0.5, 0.4)]


@pytest.mark.parametrize(
    ("trials", "unfinished", "going_on"),
    [
        (STARTS[:2], {0, 1, None}, []),
        (STARTS, {0, 1, 2, None}, [1]),
        (STARTS[:2], {0, 1}, [1, 0]),
        ([*STARTS, STARTS[0]], {0, 1, 2, 3}, [1]),
        # 1 has gone on and pauses again: it is the only one there, and others are still to come.
        ([*STARTS, (0.3, 0.1, 1, 0.6)], {0, 2, 3, None}, []),
        ([*STARTS, (0.3, 0.1, 1, 0.6)], {0, 2, 3}, [2, 0]),
        ([*STARTS, (0.3, 0.1, 1, 0.6), (0.3, 0.1, 2, 0.7), (0.3, 0.1, 0, 0.1)], {3, 4, 5}, [4]),
        # 1 has gone on and broken, and leaves its place to the next.
        ([*STARTS, (None, 0.1, 1, 0.0)], {0, 2, None}, [2]),
        # As above, but it failed and is to be tried again.
        ([*STARTS, (None, 0.1, 1, 0.0)], {0, 2, 3, None}, []),
        # The slot of 1 is gone with it.
        (STARTS, {0, 2, None}, [2]),
        # All of the last rung are complete.
        ([*STARTS, (0.3, 0.1, 1, 0.6), (1, 0.3, 1, 0.9)], {0, 2, None}, []),
    ],
)
def test_who_goes_on(trials: list[Any], unfinished: set[int | None], going_on: list[int]) -> None:
    assert PROMOTION.going_on(study_of(*trials), unfinished) == going_on


def test_those_who_never_will_are_known_without_those_that_have_gone_on() -> None:
    trials = [(0.1, None, None, value / 100) for value in range(12)]
    trials += [(1, 0.1, 0, 0.9)]
    hopeless = PROMOTION.hopeless(study_of(*trials), {*range(1, 12), None})
    assert hopeless == {1, 2, 3}, "half as many again as the four, and two more, are kept; 0 has gone on"


def test_a_study_is_done_when_its_last_trials_are() -> None:
    """Of nine trials, three go on from the first rung and one from the last."""
    ended = [0.0] * 9 + [0.1] * 3 + [0.3]
    done, total = PROMOTION.work(ended)
    assert done == pytest.approx(total) == pytest.approx(9 * 0.1 + 3 * 0.2 + 0.7)
    assert PROMOTION.work(ended[:-1])[0] == pytest.approx(total - 0.7)


def test_a_minimum_is_searched_as_well() -> None:
    promotion = Promotion((0.1,), reduction_factor=3, keep=1, directions=("minimize",), num_trials=9)
    assert promotion.going_on(study_of(*STARTS), {0, 1, 2, None}) == [0]


@pytest.mark.parametrize(
    ("used", "resumed_at", "rung"),
    [
        (0.05, 0.0, None),
        (0.1, 0.0, 0.1),
        (0.2, 0.1, None),
        (0.35, 0.0, 0.3),
        (0.35, 0.3, None),
        (1.0, 0.1, None),
    ],
)
def test_where_a_trial_pauses(used: float, resumed_at: float, rung: float | None) -> None:
    assert PROMOTION.pauses_at(used, resumed_at) == rung


@pytest.mark.parametrize(("num_trials", "rungs"), [(1, []), (2, [0.3]), (3, [0.3]), (4, [0.1, 0.3])])
def test_none_pauses_where_all_would_go_on(num_trials: int, rungs: list[float]) -> None:
    promotion = replace(PROMOTION, num_trials=num_trials)
    assert [share for share in (0.1, 0.3) if promotion.pauses_at(share, 0.0) == share] == rungs
    ended = [*([0.0] * num_trials), *([rungs[-1]] if rungs else [])]
    done, total = promotion.work(ended)
    assert done <= total
    if num_trials < 4:  # of these one goes on to the end
        assert done == pytest.approx(total)
