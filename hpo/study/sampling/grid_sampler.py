"""Points that are given out to trials, each to one: those of a grid, and those of a comparison's plan.

Optuna's grid gives points to trials by number, whatever the worker can run, and may give one twice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from hpo.config.comparison import ComparisonConfig
from hpo.config.search_space import SearchSpace, grid
from hpo.outcome import Outcome
from hpo.precision.table import named_choices
from hpo.study.store.optuna_internals import all_trials, storage_of, trial_id_of

Lock = Callable[[], AbstractContextManager[object]]
Point = dict[str, Any]
"""The parameters of a trial, as Optuna holds them."""

POINT_ATTR = "hpo:grid"


class NoPointLeft(Exception):
    """Every point that this worker can run has been given out; see `SharedGrid`."""


def known_params(trial: FrozenTrial) -> Mapping[str, Any]:
    """The parameters of a trial, on a grid also those that it was given and has not suggested yet."""
    return {**trial.system_attrs.get(POINT_ATTR, {}), **trial.params}


def grid_points(space: SearchSpace, seed: int) -> list[Point]:
    """All combinations of the values of a finite space, in a random order."""
    values = grid(space)
    names = sorted(values)
    products = itertools.product(*(values[name] for name in names))
    points = [dict(zip(names, product, strict=True)) for product in products]
    random.Random(seed).shuffle(points)
    return points


class SharedGrid(BaseSampler):
    """Points, each for one trial of the workers that share them.

    A trial and its retry keep their point. A trial that FAILed without having run leaves its point to
    another. When all points have been tried and a slot is still open, they are tried again.

    Args:
        skipped: precisions that this worker does not draw.
        lock: held while a point is chosen, so that no two workers choose the same.
    """

    def __init__(self, points: Sequence[Point], skipped: Container[str], lock: Lock) -> None:
        self._points = points
        self._skipped = skipped
        self._lock = lock

    def points_left(self, study: Study) -> Sequence[Point]:
        """Those that are left to try."""
        return self._untried(all_trials(study)) or self._points

    def _untried(self, trials: Sequence[FrozenTrial]) -> list[Point]:
        tried = {tuple(trial.system_attrs[POINT_ATTR].values()) for trial in _tried(trials)}
        return [point for point in self._points if tuple(point.values()) not in tried]

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Give the trial its point. Raises NoPointLeft where those that are left are for other devices."""
        if trial.params and POINT_ATTR in trial.system_attrs:
            return
        with self._lock():
            others = [other for other in all_trials(study) if other.number != trial.number]
            points = {other.number: other.system_attrs.get(POINT_ATTR) for other in others}
            failed = trial.user_attrs.get("retry_of")
            point = trial.system_attrs.get(POINT_ATTR) if failed is None else points[failed]
            taken = [points[other.number] for other in _tried(others)]
            # The lock is lost with the connection: then two workers may have chosen the same.
            if point is None or (failed is None and point in taken):
                point = self._choose(others, trial.system_attrs.get("fixed_params", {}))
            if point is None:
                raise NoPointLeft
            storage_of(study).set_trial_system_attr(trial_id_of(trial), POINT_ATTR, point)
            trial.system_attrs[POINT_ATTR] = point

    def _choose(self, trials: Sequence[FrozenTrial], fixed: Mapping[str, Any]) -> Point | None:
        """The first point left to try that this worker can run; None: there is none.

        `fixed` are the parameters that a trial was enqueued with: it has them, whatever was tried before.
        """
        untried = self._untried(trials)
        for point in [*untried, *self._points] if fixed or not untried else untried:
            drawn = {name: value for name, value in point.items() if name not in fixed}
            runnable = not any(name in self._skipped for name in named_choices(drawn))
            if runnable and fixed.items() <= point.items():
                return point
        return {**self._points[0], **fixed} if fixed else None

    def infer_relative_search_space(self, *_: object) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, *_: object) -> dict[str, Any]:
        return {}

    def sample_independent(self, _: Study, trial: FrozenTrial, name: str, __: BaseDistribution) -> Any:
        return trial.system_attrs[POINT_ATTR][name]


class PlannedPoints(SharedGrid):
    """The points of a comparison, in their order, as the plan is when a trial begins.

    Args:
        read_plan: reads it from the database, where `hpo compare` lets it grow.
    """

    def __init__(self, read_plan: Callable[[], ComparisonConfig], lock: Lock) -> None:
        super().__init__([], (), lock)
        self._read_plan = read_plan

    def _choose(self, trials: Sequence[FrozenTrial], fixed: Mapping[str, Any]) -> Point | None:
        self._points = self._read_plan().points()
        return None if fixed else next(iter(self._untried(trials)), None)


def _tried(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that have a point, but for those that FAILed without having run."""
    return [
        trial
        for trial in trials
        if POINT_ATTR in trial.system_attrs
        and (trial.state != TrialState.FAIL or trial.user_attrs.get("outcome") == Outcome.FAILED)
    ]
