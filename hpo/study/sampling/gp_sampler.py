"""A view of a study for Optuna's Gaussian process, which uses only COMPLETE trials.

The view shows infeasible and pruned trials as COMPLETE, with substitute values: otherwise the process would
propose infeasible configurations again and again. TPE has the same view with several objectives, because it
takes all PRUNED trials for equally good then.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import FEASIBLE, violation
from hpo.study.sampling.device_sampler import NewlyEnded, WrapperSampler
from hpo.study.sampling.feasible_sampler import is_infeasible
from hpo.study.sampling.promotion import rungs_of
from hpo.study.store.optuna_internals import StudyView


class PrunedAwareSampler(WrapperSampler):
    """Shows its sampler PRUNED trials as COMPLETE, if the study has at least `num_objectives`.

    A paused trial has the values of its first rung, so that all are compared at the same length. Any other
    pruned trial has the value of its best evaluation. An infeasible trial has the worst of all values, and
    breaks each limit by the largest violation of any trial.
    """

    def __init__(self, sampler: BaseSampler, num_objectives: int = 1) -> None:
        super().__init__(sampler)
        self._num_objectives = num_objectives
        self._ended = NewlyEnded()
        self._worst: list[float] = []
        self._broken: dict[str, float] = {}
        self._names: set[str] = set()
        self._shown: dict[int, FrozenTrial] = {}

    def view(self, study: Study) -> Study:
        if len(study.directions) < self._num_objectives:
            return study
        return StudyView(study, lambda: self._with_pruned(study))

    def _with_pruned(self, study: Study) -> list[FrozenTrial]:
        begun = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        trials, directions = study.get_trials(deepcopy=False, states=begun), study.directions
        ended, unfinished = self._ended.split(trials)
        self._worst, self._broken = _extremes(ended, directions, self._worst, self._broken)
        worst, broken = _extremes(unfinished, directions, self._worst, self._broken)
        if broken.keys() != self._names:
            self._names, self._shown = {*broken}, {}
        return [
            self._shown.get(trial.number) or self._show(trial, directions, worst, broken) for trial in trials
        ]

    def _show(
        self,
        trial: FrozenTrial,
        directions: Sequence[StudyDirection],
        worst: list[float],
        broken: Mapping[str, float],
    ) -> FrozenTrial:
        shown, values = copy.copy(trial), _values(trial, directions)
        limits = broken if is_infeasible(trial) else _limits(trial)
        if values is None and (is_infeasible(trial) or violation(limits)):
            values = worst or [0.0] * len(directions)
        elif trial.datetime_complete is not None:
            self._shown[trial.number] = shown
        if values:
            shown.state, shown.values = TrialState.COMPLETE, values
        shown.system_attrs = {}
        for name in sorted(self._names):
            shown.set_constraint(name, limits.get(name, 0.0))
        return shown


def _extremes(
    trials: Iterable[FrozenTrial],
    directions: Sequence[StudyDirection],
    worst: list[float],
    broken: Mapping[str, float],
) -> tuple[list[float], dict[str, float]]:
    most = dict(broken)
    for trial in trials:
        for name, value in _limits(trial).items():
            most[name] = max(most.get(name, 0.0), value)
        if values := _values(trial, directions):
            pairs = zip(directions, worst or values, values, strict=True)
            worst = [min(pair) if way == StudyDirection.MAXIMIZE else max(pair) for way, *pair in pairs]
    return worst, most


def _limits(trial: FrozenTrial) -> dict[str, float]:
    return {name: value for name, value in trial.constraints.items() if name != FEASIBLE}


def _values(trial: FrozenTrial, directions: Sequence[StudyDirection]) -> list[float] | None:
    if is_infeasible(trial):
        return None
    if at_rungs := rungs_of(trial.user_attrs):
        return list(next(iter(at_rungs.values()))["values"])
    if trial.state == TrialState.COMPLETE:
        return list(trial.values)
    reports = filter(math.isfinite, trial.intermediate_values.values())
    better = max if directions[0] == StudyDirection.MAXIMIZE else min
    best = better(reports, default=None) if trial.state == TrialState.PRUNED else None
    return None if best is None else [best]
