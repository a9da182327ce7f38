"""Points that are given out to trials, each to one: those of a grid, and those of a comparison's plan.

Optuna's grid gives points to trials by number, whatever the worker can run, and may give one twice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from hpo.config.comparison import ComparisonConfig
from hpo.config.search_space import SearchSpace, grid
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION
from hpo.study.store.optuna_internals import all_trials, storage_of, trial_id_of

Lock = Callable[[], AbstractContextManager[object]]
Point = dict[str, Any]
"""The parameters of a trial, as Optuna holds them."""

POINT_ATTR = "hpo:grid"
"""System attribute of a trial: its point."""
DEVICE_ATTR = "hpo:device"
"""System attribute of a trial of a comparison: what it was begun on, as `DeviceInfo.kind`."""


class NoPointLeft(Exception):
    """Every point that this worker can run has been given out; see `SharedGrid`."""


def known_params(trial: FrozenTrial) -> Mapping[str, Any]:
    """The parameters of a trial, on a grid also those that it was given and has not suggested yet, and in a
    comparison, as `DEVICE_ATTR`, the kind of device that it was begun on."""
    attributes = trial.system_attrs
    kind = {DEVICE_ATTR: attributes[DEVICE_ATTR]} if DEVICE_ATTR in attributes else {}
    return {**attributes.get(POINT_ATTR, {}), **kind, **trial.params}


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

    A trial keeps its point whoever goes on with it, and its retry has the same. A point is done when its
    trial is, unless that FAILed without having run, as when `n_trials` is lowered. Where all points have been
    tried and a slot is still open, they are tried again.

    Args:
        skipped: precisions that this worker does not draw.
        lock: held while a point is chosen, so that no two workers choose the same.
    """

    def __init__(self, points: Sequence[Point], skipped: Container[str], lock: Lock) -> None:
        self._points = points
        self._skipped = skipped
        self._lock = lock

    def precisions_left(self, study: Study) -> list[str]:
        """Of the points that are left to try, the precisions."""
        untried = self._untried(all_trials(study)) or self._points
        return list(dict.fromkeys(point[PRECISION] for point in untried if PRECISION in point))

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
            for key, value in self._attributes(point).items():
                storage_of(study).set_trial_system_attr(trial_id_of(trial), key, value)
                trial.system_attrs[key] = value

    def _attributes(self, point: Point) -> dict[str, Any]:
        """What is stored with a trial of this point."""
        return {POINT_ATTR: point}

    def _choose(self, trials: Sequence[FrozenTrial], fixed: Mapping[str, Any]) -> Point | None:
        """The first point left to try that this worker can run; None: there is none.

        `fixed` are the parameters that a trial was enqueued with: it has them, whatever was tried before.
        """
        untried = self._untried(trials)
        for point in [*untried, *self._points] if fixed or not untried else untried:
            runnable = PRECISION in fixed or point.get(PRECISION) not in self._skipped
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

    All trials of a block run on one kind of device: a worker takes none of a block that was begun on another
    kind, goes on with no trial that was, and has none at all where its device lacks one of the precisions.

    Args:
        read_plan: reads it from the database, where `hpo compare` lets it grow.
        device: what this worker runs on, as `DeviceInfo.kind`.
    """

    def __init__(
        self, read_plan: Callable[[], ComparisonConfig], device: str, skipped: Container[str], lock: Lock
    ) -> None:
        super().__init__([], skipped, lock)
        self._read_plan = read_plan
        self._device = device

    def precisions_left(self, study: Study) -> list[str]:
        del study
        return self._skipped_in_plan() or [*self._read_plan().precisions]

    def _skipped_in_plan(self) -> list[str]:
        return [name for name in self._read_plan().precisions if name in self._skipped]

    def _choose(self, trials: Sequence[FrozenTrial], fixed: Mapping[str, Any]) -> Point | None:
        plan = self._read_plan()
        if fixed or self._skipped_in_plan():
            return None
        return next((point for point, kind in self._left(plan, trials) if kind in (None, self._device)), None)

    def _left(self, plan: ComparisonConfig, trials: Sequence[FrozenTrial]) -> Iterator[tuple[Point, Any]]:
        """The points left to try, each with the kind of device that its block was begun on, if it was."""
        begun = {
            plan.block(trial.system_attrs[POINT_ATTR]): trial.system_attrs.get(DEVICE_ATTR)
            for trial in _tried(trials)
        }
        self._points = plan.points()
        for point in self._untried(trials):
            yield point, begun.get(plan.block(point))

    def can_run(self, study: Study, params: Mapping[str, Any]) -> bool:
        """Whether this worker can run a trial with these `known_params`, or with {} begin one."""
        if self._skipped_in_plan():
            return False
        if params:
            return bool(params.get(DEVICE_ATTR, self._device) == self._device)
        return self._choose(all_trials(study), {}) is not None

    def kinds_left(self, study: Study) -> list[str]:
        """The other kinds of device that trials which are left to run were begun for."""
        trials = all_trials(study)
        kinds = {kind for _, kind in self._left(self._read_plan(), trials)}
        kinds |= {trial.system_attrs.get(DEVICE_ATTR) for trial in trials if not trial.state.is_finished()}
        return sorted(kinds - {None, self._device})

    def _attributes(self, point: Point) -> dict[str, Any]:
        return {DEVICE_ATTR: self._device, POINT_ATTR: point}


def _tried(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that have a point, but for those that FAILed without having run."""
    return [
        trial
        for trial in trials
        if POINT_ATTR in trial.system_attrs
        and (trial.state != TrialState.FAIL or trial.user_attrs.get("outcome") == Outcome.FAILED)
    ]
