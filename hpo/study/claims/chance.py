"""The chance that a better result is still to come.

Before anything is known of them, each trial of a study is its best with the same chance. So the chance that
one of those that have not begun is the best is their share of all trials, whatever the values so far (the law
of records: Rényi, "Théorie des éléments saillants d'une suite d'observations", 1962). That it is better by
more than a little is the less likely, the closer the best are to each other: with values that fall off
exponentially at the end, as the mean excess of the best over the next tells, by `exp(-little / excess)`.

Values compare that are of trials of the same length: the complete ones or, where these are few, those that
paused at the last rung that has enough; but not at their first, where all are close as none has learned much.

A sampler that learns draws better trials later, and a result far beyond a crowd gives no sign of itself. How
often it is wrong: `tests/benchmarks/README.md`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import violation
from hpo.study.sampling.promotion import PAUSED_ATTR, RESUMED_ATTR, is_paused

NUM_BEST = 8
"""Whose excess over the next one is looked at; with no more values than that, nothing is known of it."""
LITTLE = 0.05
"""Of the difference between the best and the median: an improvement that does not matter."""


def num_begun(trials: Sequence[FrozenTrial]) -> int:
    """How many trials of a study have begun; one that goes on, or is tried again, counts once."""
    left_out = (TrialState.FAIL, TrialState.WAITING)
    return sum(t.state not in left_out and RESUMED_ATTR not in t.user_attrs for t in trials)


def chance_of_better(trials: Sequence[FrozenTrial], loss_sign: float, num_to_come: float) -> float:
    """The chance that one of the trials that have not begun is better, by more than a little.

    It is 1 while one waits that somebody enqueued.

    Args:
        loss_sign: by which values become losses.
        num_to_come: how many trials have not begun.
    """
    if any(trial.state == TrialState.WAITING for trial in trials):
        return 1.0
    losses_at: dict[float, list[float]] = defaultdict(list)
    for trial in trials:
        is_complete, went_on = trial.state == TrialState.COMPLETE, RESUMED_ATTR in trial.user_attrs
        if (is_complete or (went_on and is_paused(trial))) and not violation(trial.constraints):
            at = 1.0 if is_complete else trial.user_attrs[PAUSED_ATTR]
            losses_at[at].append(loss_sign * trial.values[0])
    enough = [at for at, losses in losses_at.items() if len(losses) > NUM_BEST]
    share = num_to_come / max(1.0, num_begun(trials) + num_to_come)
    if not enough:
        return share
    losses_N = np.sort(losses_at[max(enough)])
    excess = losses_N[NUM_BEST] - losses_N[:NUM_BEST].mean()
    little = LITTLE * (np.median(losses_N) - losses_N[0])
    if not excess:  # the best are the same
        return 0.0 if little else share
    return share * math.exp(-little / excess)
