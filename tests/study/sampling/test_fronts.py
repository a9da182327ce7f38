"""Promotion and samplers with several objectives."""

from __future__ import annotations

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.study.sampling.promotion import Promotion, Standings

DIRECTIONS = ("maximize", "minimize")
RATE = optuna.distributions.FloatDistribution(0.0001, 0.9)
VALUES = [(0.1, 1.0), (0.3, 2.0), (0.2, 3.0), (0.5, 4.0), (0.4, 5.0), (0.9, 7.0), (0.8, 9.0)]
"""The first front: 0, 1, 3 and 5; the second: 2, 4 and 6."""


def trial_of(
    number: int, values: tuple[float, float], rate: float = 0.1, resumed_at: float = 0.0, **constraints: float
) -> FrozenTrial:
    """A trial with these values at the rung 0.1; it has continued if `resumed_at` is 0.1."""
    rungs = {"0.1": {"values": list(values), "constraints": constraints}}
    trial = create_trial(
        state=TrialState.RUNNING,
        params={"learning_rate": rate},
        distributions={"learning_rate": RATE},
        user_attrs={"rungs": rungs, "paused_at": 0.1, "resumed_at": resumed_at},
    )
    trial.number = number
    return trial


STARTS = [trial_of(number, values) for number, values in enumerate(VALUES)]
RESUMED = [trial_of(i, VALUES[i], resumed_at=0.1 if i in (5, 0) else 0.0) for i in range(7)]


@pytest.mark.parametrize(
    ("trials", "more_begin", "expected"),
    [
        (STARTS, True, [5, 0]),  # two of seven, the ends of the front
        (STARTS[:2], False, [1, 0]),
        (RESUMED, False, []),  # `keep` is one for each objective, and these two continue
        ([*STARTS, trial_of(7, (1.0, 0.5), memory=0.5)], True, [5, 0]),  # the best breaks a limit
        ([trial_of(n, (n, n)) for n in range(60)], False, [59, 0]),  # one large front
    ],
)
def test_the_ends_of_the_front_are_promoted_first(
    trials: list[FrozenTrial], more_begin: bool, expected: list[int]
) -> None:
    standings = Standings(Promotion((0.1,), 3, 1, DIRECTIONS, num_trials=16))
    rungs = standings.rungs(trials, lambda _: True)
    promoted = standings.promoted(rungs, more_begin=more_begin)
    assert promoted[:2] == expected
    assert len(promoted) == max(len(expected), len(trials) // 3 if len(trials) > 8 else 0)
