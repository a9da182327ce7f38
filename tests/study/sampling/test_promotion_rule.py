"""Promotion of paused trials, with one and with several objectives."""

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.errors import StorageError
from hpo.study.sampling.forecast import Stage, stages_left
from hpo.study.sampling.promotion import Promotion, Standings, check_attributes

PROMOTION = Promotion((0.1, 0.3), reduction_factor=3, keep=1, directions=("maximize",), num_trials=9)
"""At least three continue from the first rung, and one from the last."""

ENDED, BROKE, RUNS, FAILED, DROPPED = "ended", "broke", "runs", "failed", "dropped"
STATES = {ENDED: TrialState.COMPLETE, BROKE: TrialState.PRUNED, DROPPED: TrialState.PRUNED}
STATES |= {FAILED: TrialState.FAIL, RUNS: TrialState.RUNNING, "": TrialState.RUNNING}


def frozen(number: int, *reached: Any, **limits: float) -> FrozenTrial:
    """A trial by its values at its rungs and its state after the last; without a state it is paused."""
    after = reached[-1] if isinstance(reached[-1], str) else ""
    values = [one if isinstance(one, tuple) else (one,) for one in reached if one != after]
    names = ("0.1", "0.3")[: len(values)]
    rungs = {name: {"values": one, "constraints": limits} for name, one in zip(names, values, strict=True)}
    attrs: dict[str, Any] = {"rungs": rungs}
    if rungs:
        attrs["paused_at"] = max(map(float, rungs))
        attrs["resumed_at"] = 0.0 if after in ("", DROPPED) else attrs["paused_at"]
    value = 1.0 if after == ENDED else None
    trial = create_trial(state=STATES[after], value=value, user_attrs=attrs)
    trial.number = number
    return trial


def standings_of(promotion: Promotion, *trials: Any, **options: Any) -> tuple[Standings, Any]:
    """The standings of these trials (arguments of `frozen`), and their rungs."""
    standings, unfinished = Standings(promotion, **options), []
    for number, values in enumerate(trials):
        trial = frozen(number, *values) if isinstance(values, tuple) else values
        if trial.state.is_finished():
            standings.add_ended(trial)
        else:
            unfinished.append(trial)
    return standings, standings.rungs(unfinished, lambda _: True)


STARTS = ((0.3,), (0.5,), (0.4,))


@pytest.mark.parametrize(
    ("trials", "more_begin", "promoted"),
    [
        (STARTS[:2], True, []),
        (STARTS, True, [1]),
        (STARTS[:2], False, [1, 0]),
        ([*STARTS, STARTS[0]], False, [1]),
        # 1 has continued and pauses again: it is alone there, and others are still to come.
        ([STARTS[0], (0.5, 0.6), STARTS[2]], True, []),
        ([STARTS[0], (0.5, 0.6), STARTS[2]], False, [2, 0]),
        ([(0.3, 0.1), (0.5, 0.6), (0.4, 0.7)], False, [2]),
        # 1 has continued and broken, and leaves its place to the next.
        ([STARTS[0], (0.5, BROKE), STARTS[2]], True, [2]),
        # 1 has continued and failed: its next attempt begins anew, and two trials are too few.
        ([STARTS[0], (0.5, FAILED), STARTS[2]], True, []),
        ([STARTS[0], (0.5, FAILED), STARTS[2]], False, [2, 0]),
        # 1 has continued and runs.
        ([STARTS[0], (0.5, RUNS), STARTS[2]], True, []),
        # 1 was complete after the last rung.
        ([STARTS[0], (0.5, 0.6, ENDED), STARTS[2]], True, []),
        # 1 broke before the first rung, and does not count.
        ([STARTS[0], (BROKE,), STARTS[2]], True, []),
        # 1 and 2 ended as PRUNED at the first rung: they count, and leave their places.
        ([STARTS[0], (0.5, DROPPED), (0.4, DROPPED)], True, [0]),
    ],
)
def test_the_best_third_of_a_rung_continues(trials: Any, more_begin: bool, promoted: list[int]) -> None:
    standings, rungs = standings_of(PROMOTION, *trials)
    assert standings.promoted(rungs, more_begin=more_begin) == promoted


def test_trials_outside_limits_or_with_a_broken_precision_continue_last() -> None:
    trials = (frozen(0, 0.9, peak_memory=1.0), frozen(1, 0.8), frozen(2, 0.1))
    standings, rungs = standings_of(PROMOTION, *trials, continues_last=lambda trial: trial.number == 1)
    assert standings.promoted(rungs, more_begin=True) == [2]


def test_a_meanwhile_continued_trial_keeps_its_rank() -> None:
    standings = Standings(PROMOTION)
    trials = [frozen(number, *values) for number, values in enumerate(STARTS)]
    rungs = standings.rungs(trials, lambda trial: trial.number != 1, continued={1})
    assert standings.promoted(rungs, more_begin=True) == []
    assert rungs[0].num_running == 1


def test_only_the_best_paused_trials_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpo.study.sampling.promotion.MOST_PAUSED", 4)
    standings, rungs = standings_of(PROMOTION, (2.0, 0.6, ENDED), *((value / 100,) for value in range(1, 12)))
    assert standings.fallen_behind(rungs) == [7, 6, 5, 4, 3, 2, 1], "four wait, and 0 has continued"


@pytest.mark.parametrize(
    ("trials", "num_starts", "left"),
    [
        ((), 9, 9 * 0.1 + 3 * 0.2 + 0.7),
        ([(value,) for value in range(9)], 0, 3 * 0.2 + 0.7),
        ([(1, RUNS), *[(0.5,)] * 8], 0, 3 * 0.2 + 0.7),
        ([(1, 1), (1, 1), (1, 1), *[(0.5,)] * 6], 0, 0.7),
        ([(1, 1, RUNS), (1, 1), (1, 1), *[(0.5,)] * 6], 0, 0.7),
        ([(1, 1, ENDED), (1, 1), (1, 1), *[(0.5,)] * 6], 0, 0.0),
    ],
)
def test_the_remaining_training(trials: Any, num_starts: int, left: float) -> None:
    """Three of nine trials continue from the first rung, and one from the last."""
    standings, rungs = standings_of(PROMOTION, *trials)
    stages = stages_left(standings.promotion, rungs, num_starts)
    assert sum(stage.whole_trials for stage in stages) == pytest.approx(left)


def test_trials_wait_at_an_unused_rung() -> None:
    """`n_trials` was lowered from 9 to 2. Both paused trials continue, and one of them to the end."""
    standings, rungs = standings_of(replace(PROMOTION, num_trials=2), (1.0,), (0.5,))
    assert standings.promoted(rungs, more_begin=False) == [0, 1]
    stages = [Stage(0.0, 0.3, 0), Stage(0.1, 0.3, 2), Stage(0.3, 1.0, 1)]
    assert stages_left(standings.promotion, rungs, 0) == stages


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
def test_a_trial_pauses_at_its_next_rung(used: float, resumed_at: float, rung: float | None) -> None:
    assert PROMOTION.pauses_at(used, resumed_at) == rung


@pytest.mark.parametrize(("num_trials", "rungs"), [(1, []), (2, [0.3]), (3, [0.3]), (4, [0.1, 0.3])])
def test_a_rung_with_promotion_of_all_trials_is_not_used(num_trials: int, rungs: list[float]) -> None:
    promotion = replace(PROMOTION, num_trials=num_trials)
    assert promotion.used == rungs
    assert [share for share in (0.1, 0.3) if promotion.pauses_at(share, 0.0) == share] == rungs


AT_RUNG = {"values": [0.5], "constraints": {"memory": 0.0}}


@pytest.mark.parametrize(
    ("attributes", "required"),
    [
        ({}, ""),
        ({"paused_at": 0.1, "resumed_at": 0.1, "rungs": {"0.1": AT_RUNG}}, ""),
        ({"paused_at": "soon"}, "`paused_at` of trial 3 must be a number"),
        ({"resumed_at": None}, "`resumed_at` of trial 3 must be a number"),
        *(
            ({"rungs": rungs}, "`rungs` of trial 3 must be {share: {values: a number for each objective")
            for rungs in (
                *([AT_RUNG], {"x": AT_RUNG}, {"0.0": AT_RUNG}, {"1.0": AT_RUNG}, {"0.1": None}),
                *({"0.1": {**AT_RUNG, "values": values}} for values in ([], [0.5, 0.5], ["x"], None)),
                {"0.1": {**AT_RUNG, "constraints": {"memory": "much"}}},
            )
        ),
    ],
)
def test_changed_attributes_of_a_paused_trial_are_refused(attributes: Any, required: str) -> None:
    trial = create_trial(state=TrialState.RUNNING, user_attrs=attributes)
    trial.number = 3
    with pytest.raises(StorageError, match=re.escape(required)) if required else nullcontext():
        check_attributes(trial, 1)


DIRECTIONS = ("maximize", "minimize")
VALUES = [(0.1, 1.0), (0.3, 2.0), (0.2, 3.0), (0.5, 4.0), (0.4, 5.0), (0.9, 7.0), (0.8, 9.0)]
"""The first front: 0, 1, 3 and 5; the second: 2, 4 and 6."""


FRONTS = [(values,) for values in VALUES]
RESUMED = [(values, RUNS) if number in (5, 0) else (values,) for number, values in enumerate(VALUES)]


@pytest.mark.parametrize(
    ("trials", "more_begin", "expected"),
    [
        (FRONTS, True, [5, 0]),  # two of seven, the ends of the front
        (FRONTS[:2], False, [1, 0]),
        (RESUMED, False, []),  # `keep` is one for each objective, and these two continue
        ([*FRONTS, frozen(7, (1.0, 0.5), memory=0.5)], True, [5, 0]),  # the best breaks a limit
        ([((n, n),) for n in range(60)], False, [59, 0]),  # one large front
    ],
)
def test_the_ends_of_the_front_are_promoted_first(
    trials: list[Any], more_begin: bool, expected: list[int]
) -> None:
    standings, rungs = standings_of(Promotion((0.1,), 3, 1, DIRECTIONS, num_trials=16), *trials)
    promoted = standings.promoted(rungs, more_begin=more_begin)
    assert promoted[:2] == expected
    assert len(promoted) == max(len(expected), len(trials) // 3 if len(trials) > 8 else 0)


def test_a_first_rung_without_a_ranking_is_not_used() -> None:
    trials, standings = [frozen(number, 0.5) for number in range(6)], Standings(PROMOTION)
    for trial in trials[:4]:
        trial.user_attrs["rungs"]["0.1"]["is_constant"] = True
    assert len(standings.rungs(trials[:4], lambda _: True)) == 2, "four trials are too few"
    (rung,) = standings.rungs(trials, lambda _: True)
    assert (rung.num_paused, standings.promotion.rungs) == (0, (0.3,))
    assert standings.left_out.startswith("At 10% of their training, 4 of 6 trials are no better than")
    trials[0].user_attrs["rungs"]["0.1"]["is_constant"] = False
    assert len(standings.rungs(trials, lambda _: True)) == 2, "the trials alone decide"
