"""What Optuna's Gaussian process is shown: it looks at COMPLETE trials only.

So it would never learn what is infeasible and propose it again, and learn nothing from what the pruner
stopped. Here such trials are COMPLETE to it, with a value that stands for them.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.study.sampling.device_sampler import WrapperSampler
from hpo.study.sampling.feasible_sampler import is_infeasible
from hpo.study.sampling.promotion import ORIGIN_ATTR, origin_of
from hpo.study.store.optuna_internals import StudyView


class PrunedAwareSampler(WrapperSampler):
    """Shows its sampler PRUNED trials as COMPLETE.

    One that the pruner stopped has the value of its best evaluation. An infeasible one has the worst of these
    values and those of the COMPLETE trials. One that paused and went on is shown as of where it paused, so
    that all are compared at the same length, unless it turned out to be infeasible.
    """

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._view = StudyView(study, lambda: _with_pruned(study))
        super().before_trial(self._view, trial)

    def infer_relative_search_space(self, _: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return super().infer_relative_search_space(self._view, trial)

    def sample_relative(
        self, _: Study, trial: FrozenTrial, space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return super().sample_relative(self._view, trial, space)


def _with_pruned(study: Study) -> list[FrozenTrial]:
    trials = study.get_trials(deepcopy=False)
    infeasible = {origin_of(t.number, t.user_attrs) for t in trials if is_infeasible(t)}
    trials = [t for t in trials if ORIGIN_ATTR not in t.user_attrs]
    values_of = {t.number: _values(study, t) for t in trials if t.number not in infeasible}
    known = [values for values in values_of.values() if values] or [[0.0] * len(study.directions)]
    worst = [
        min(of_objective) if direction == StudyDirection.MAXIMIZE else max(of_objective)
        for direction, of_objective in zip(study.directions, zip(*known, strict=True), strict=True)
    ]
    shown = []
    for t in map(copy.copy, trials):
        if values := values_of.get(t.number, worst):
            t.state, t.values = TrialState.COMPLETE, values
        t.system_attrs = {}  # the constraint of an infeasible one, which no other has
        shown.append(t)
    return shown


def _values(study: Study, trial: FrozenTrial) -> list[float] | None:
    """Of a COMPLETE trial its values, of a PRUNED one its best evaluation; None: there is nothing finite."""
    if trial.state == TrialState.COMPLETE:
        return list(trial.values)
    reports = filter(math.isfinite, trial.intermediate_values.values())
    better = max if study.directions[0] == StudyDirection.MAXIMIZE else min
    best = better(reports, default=None) if trial.state == TrialState.PRUNED else None
    return None if best is None else [best]
