"""Patience: a trial that has stopped to improve ends its training early.

Only the first objective counts, as for the best weights. The learning rate follows the whole budget, so a
trial that ends early has trained at higher rates than one that comes to its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hpo.config.limits import ObjectiveConfig
from hpo.config.sections import EvaluationConfig


def patience_over(values: Sequence[float], objective: ObjectiveConfig, settings: EvaluationConfig) -> str:
    """Return why the patience of a study is over after these evaluations; empty: it is not."""
    count = evaluations_without_improvement(values, objective, settings.min_delta)
    if settings.patience is None or count < settings.patience:
        return ""
    by = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
    return f"{objective.metric} has not improved{by} in {count} evaluations (evaluation.patience)"


def evaluations_without_improvement(
    values: Iterable[float], objective: ObjectiveConfig, min_delta: float = 0.0
) -> int:
    """Return the number of evaluations since the last improvement.

    An evaluation improves if its value is better than that of the last improvement by more than `min_delta`.
    NaN, the value of an undefined metric, is no improvement. It does not count before the first value.

    Args:
        values: of the objective, one for each evaluation of the trial.
    """
    sign = 1 if objective.direction == "maximize" else -1
    best, count = -math.inf, 0
    for value in values:
        if sign * value > best + min_delta:
            best, count = sign * value, 0
        elif best > -math.inf:
            count += 1
    return count
