"""What Optuna's Gaussian process is shown: it looks at COMPLETE trials only.

So it would never learn what is infeasible and propose it again, and learn nothing from what the pruner
stopped. Here such trials are COMPLETE to it, with a value that stands for them. So they are to TPE where
there are several objectives, as it takes all PRUNED trials for equally good then.
"""

from __future__ import annotations

import copy
import math

from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import FEASIBLE, violation
from hpo.study.sampling.device_sampler import WrapperSampler
from hpo.study.sampling.feasible_sampler import is_infeasible
from hpo.study.sampling.promotion import rungs_of
from hpo.study.store.optuna_internals import StudyView


class PrunedAwareSampler(WrapperSampler):
    """Shows its sampler PRUNED trials as COMPLETE, if the study has at least `num_objectives`.

    A pruned trial has the value of its best evaluation, or with several objectives the values with which it
    paused. An infeasible one has the worst of all values, and breaks each limit like the worst trial that
    did. A trial that paused and went on is shown as of its pause, so that all are compared at the same
    length.
    """

    def __init__(self, sampler: BaseSampler, num_objectives: int = 1) -> None:
        super().__init__(sampler)
        self._num_objectives = num_objectives

    def view(self, study: Study) -> Study:
        if len(study.directions) < self._num_objectives:
            return study
        return StudyView(study, lambda: _with_pruned(study))


def _with_pruned(study: Study) -> list[FrozenTrial]:
    every = study.get_trials(deepcopy=False)
    infeasible = {trial.number for trial in every if is_infeasible(trial)}
    trials = every
    values_of = {t.number: _values(study, t) for t in trials if t.number not in infeasible}
    known = [values for values in values_of.values() if values] or [[0.0] * len(study.directions)]
    worst = [
        min(of_objective) if direction == StudyDirection.MAXIMIZE else max(of_objective)
        for direction, of_objective in zip(study.directions, zip(*known, strict=True), strict=True)
    ]
    limits_of = {t.number: _limits(t) for t in trials}
    names = {name for limits in limits_of.values() for name in limits}
    broken = {name: max(0.0, *(limits.get(name, 0.0) for limits in limits_of.values())) for name in names}
    shown = []
    for t in map(copy.copy, trials):
        limits = broken if t.number in infeasible else limits_of[t.number]
        values = values_of.get(t.number, worst) or (worst if violation(limits) else None)
        if values:
            t.state, t.values = TrialState.COMPLETE, values
        t.system_attrs = {}
        for name in sorted(names):
            t.set_constraint(name, limits.get(name, 0.0))
        shown.append(t)
    return shown


def _limits(trial: FrozenTrial) -> dict[str, float]:
    """The constraints of a trial that are limits of the study."""
    return {name: value for name, value in trial.constraints.items() if name != FEASIBLE}


def _values(study: Study, trial: FrozenTrial) -> list[float] | None:
    """Of a COMPLETE trial its values, of a PRUNED one its best evaluation; None: there is nothing finite."""
    if rungs := rungs_of(trial.user_attrs):
        return list(next(iter(rungs.values()))["values"])
    if trial.state == TrialState.COMPLETE or len(study.directions) > 1:
        return trial.values and list(trial.values)
    reports = filter(math.isfinite, trial.intermediate_values.values())
    better = max if study.directions[0] == StudyDirection.MAXIMIZE else min
    best = better(reports, default=None) if trial.state == TrialState.PRUNED else None
    return None if best is None else [best]
