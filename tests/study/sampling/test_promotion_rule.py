"""Which paused trials are promoted, from the trials alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.study.sampling.promotion import MOST_PAUSED, Promotion, Rung, Standings

PROMOTION = Promotion((0.1, 0.3), reduction_factor=3, keep=1, directions=("maximize",), num_trials=9)
"""At least three go on from the first rung, and one from the last."""


def trial(*values: float, state: str = "paused", precision: str = "fp32") -> FrozenTrial:
    """A trial with these values at the rungs. `running`: it continues from the last of them."""
    rungs = PROMOTION.rungs[: len(values)]
    attrs: dict[str, Any] = {"paused_at": rungs[-1], "resumed_at": rungs[-1] if state == "running" else 0.0}
    attrs["rungs"] = {str(rung): {"values": [one]} for rung, one in zip(rungs, values, strict=True)}
    states = {"complete": TrialState.COMPLETE, "broken": TrialState.PRUNED}
    return create_trial(
        state=states.get(state, TrialState.RUNNING),
        value=values[-1] if state == "complete" else None,
        params={"fp_precision": precision},
        distributions={"fp_precision": CategoricalDistribution(("fp32", "fp16"))},
        user_attrs=attrs,
    )


def standings_of(
    trials: Sequence[FrozenTrial], promotion: Promotion = PROMOTION, absent: str = ""
) -> tuple[Standings, list[Rung]]:
    """The standings, in which fp16 has broken. No live worker can run trials in the precision `absent`."""
    standings = Standings(promotion, lambda trial: trial.params["fp_precision"] == "fp16")
    for number, one in enumerate(trials):
        one.number = number
        if one.state.is_finished():
            standings.add_ended(one)
    unfinished = [one for one in trials if not one.state.is_finished()]
    return standings, standings.rungs(unfinished, lambda trial: trial.params["fp_precision"] != absent)


def promoted(trials: Sequence[FrozenTrial], *, more_begin: bool, **options: Any) -> list[int]:
    standings, rungs = standings_of(trials, **options)
    return standings.promoted(rungs, more_begin=more_begin)


@pytest.mark.parametrize(
    ("trials", "more_begin", "expected"),
    [
        ([trial(0.3), trial(0.5)], True, []),
        ([trial(0.3), trial(0.5), trial(0.4)], True, [1]),
        ([trial(0.3), trial(0.5)], False, [1, 0]),
        ([trial(0.3), trial(0.5), trial(0.4), trial(0.3)], False, [1]),
        # The best one pauses again. It is alone there, and others are still to come.
        ([trial(0.3), trial(0.5, 0.6), trial(0.4)], True, []),
        ([trial(0.3), trial(0.5, 0.6), trial(0.4)], False, [2, 0]),
        ([trial(0.3, 0.1), trial(0.5, 0.6), trial(0.4, 0.7)], False, [2]),
        # The best one broke after the rung, and leaves its place to the next.
        ([trial(0.3), trial(0.5, state="broken"), trial(0.4)], True, [2]),
        ([trial(0.3), trial(0.5, state="running"), trial(0.4)], True, []),
        ([trial(0.3), trial(0.5, 0.6, state="complete"), trial(0.4)], True, []),
    ],
)
def test_the_best_of_a_rung_are_promoted(
    trials: list[FrozenTrial], more_begin: bool, expected: list[int]
) -> None:
    assert promoted(trials, more_begin=more_begin) == expected


def test_trials_whose_precision_has_broken_are_promoted_last() -> None:
    trials = [trial(0.9, precision="fp16"), trial(0.3), trial(0.5), trial(0.8, precision="fp16")]
    assert promoted(trials, more_begin=True) == [2]
    assert promoted(trials[:2], more_begin=False) == [1, 0]


def test_a_trial_for_an_absent_device_leaves_its_place_to_the_next() -> None:
    trials = [trial(0.4), trial(0.3), trial(0.9, precision="fp16")]
    assert promoted(trials, more_begin=True, absent="fp16") == [0]


def test_the_paused_trials_behind_too_many_better_ones_end() -> None:
    trials = [trial(value / 100) for value in range(MOST_PAUSED + 3)]
    standings, rungs = standings_of(trials)
    assert sorted(standings.fallen_behind(rungs)) == [0, 1, 2]


def test_the_stages_of_nine_trials() -> None:
    """Three trials continue from the first rung, and one from the last."""
    stages = [(stage.begin, stage.end, stage.num_trials) for stage in PROMOTION.stages(9)]
    assert stages == [(0.0, 0.1, 9), (0.1, 0.3, 3), (0.3, 1.0, 1)]


def test_a_minimum_is_searched_as_well() -> None:
    promotion = Promotion((0.1,), reduction_factor=3, keep=1, directions=("minimize",), num_trials=9)
    trials = [trial(0.3), trial(0.5), trial(0.4)]
    assert promoted(trials, more_begin=True, promotion=promotion) == [0]


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
def test_no_trial_pauses_if_all_would_continue(num_trials: int, rungs: list[float]) -> None:
    promotion = replace(PROMOTION, num_trials=num_trials)
    assert [share for share in (0.1, 0.3) if promotion.pauses_at(share, 0.0) == share] == rungs
