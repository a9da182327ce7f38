"""Which configuration is tried next, and when a trial stops early: Optuna's samplers and pruners.

A worker draws only what its device can run: `device_sampler`. A precision that runs and still cannot work
must not eat the budget either, and each sampler needs help of its own with that, because such a trial ends
as PRUNED with an infeasible constraint (see `leases`):

- TPE ranks infeasible trials last, but its first trials are random, as are all trials of NSGA-II's first
  generation and its mutations. `InfeasibleFilterSampler` replaces a choice of which every trial was
  infeasible.
- GP looks at COMPLETE trials only. `PrunedAwareSampler` shows it a copy of the study.

Random, QMC and the grid do not learn, and CMA-ES draws categories at random: with them, such a trial ends
before training.

TPE and GP come back to what they found good: on a grid, to the very same configuration. `AvoidRepeats`
changes that. GP is told the order of choices that are numbers: `[8, 16, 32]` has a middle. The sampler `grid`
is our own, `SharedGrid`: Optuna's gives points to trials by number, whatever the worker can run, and may give
one twice.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from hpo.config.search_space import SearchSpace, grid, is_finite
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION
from hpo.study import cma_sampler
from hpo.study.device_sampler import ANY_DEVICE, DeviceSampler, WorkerDevice
from hpo.study.feasible_sampler import AvoidRepeats, InfeasibleFilterSampler
from hpo.study.gp_sampler import PrunedAwareSampler

if TYPE_CHECKING:
    from hpo.config.sampler_config import PrunerConfig, SamplerConfig

Lock = Callable[[], AbstractContextManager[object]]

POINT_ATTR = "hpo:grid"
"""System attribute of a trial: its point of the grid."""


def build_sampler(
    config: SamplerConfig,
    space: SearchSpace,
    *,
    worker_number: int = 0,
    device: WorkerDevice = ANY_DEVICE,
    skipped: Container[str] = (),
    lock: Lock = nullcontext,
) -> BaseSampler:
    """Return the sampler of one worker of a study.

    Args:
        worker_number: added to the seed, without which two workers would try the same configurations; only
            `grid` and `qmc` continue one sequence among all workers and need the same seed for it.
        skipped: precisions that this worker does not draw.
        lock: held while a point of the grid is chosen, so that no two workers choose the same.
    """
    if config.name == "grid":
        return SharedGrid(space, config.seed, skipped, lock)
    choices: tuple[Any, ...] = space[PRECISION].grid() if PRECISION in space else ()
    # Where a device runs no choice, `run_worker` asks for no proposal.
    runnable = tuple(choice for choice in choices if choice not in skipped) or choices
    if choices:
        space = {**space, PRECISION: space[PRECISION].model_copy(update={"choices": runnable})}
    sampler = _build_optuna_sampler(config, space, (config.seed + worker_number) % 2**32)
    models = config.name in ("tpe", "gp")
    return DeviceSampler(sampler, device, choices, runnable, models_choices=models)


def _build_optuna_sampler(config: SamplerConfig, space: SearchSpace, seed: int) -> BaseSampler:
    """Optuna's sampler, wrapped in what it needs against trials that cannot work."""
    name, options = config.name, config.options
    if name in ("gp", "cmaes", "qmc"):
        options["warn_independent_sampling"] = False
    if name in ("cmaes", "qmc"):
        options["independent_sampler"] = RandomSampler(seed=seed)
    options["seed"] = config.seed if name == "qmc" else seed
    sampler: BaseSampler = _build(cma_sampler if name == "cmaes" else optuna.samplers, config, options)
    if name == "gp":
        sampler = PrunedAwareSampler(sampler)
    if name not in ("tpe", "gp", "nsga2"):
        return sampler
    feasible = InfeasibleFilterSampler(sampler, seed)
    return AvoidRepeats(feasible, space, seed) if name != "nsga2" and is_finite(space) else feasible


def build_pruner(config: PrunerConfig) -> BasePruner:
    """Return Optuna's pruner of that name. Steps are evaluations."""
    wrapped = {"wrapped_pruner": None} if config.name == "patient" else {}
    pruner: BasePruner = _build(optuna.pruners, config, config.options | wrapped)
    return pruner


def _build(module: Any, config: SamplerConfig | PrunerConfig, options: Mapping[str, Any]) -> Any:
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        return getattr(module, config.CLASSES[config.name])(**options)


class NoPointLeft(Exception):
    """Every point of the grid that this worker can run has been tried; see `SharedGrid`."""


def known_params(trial: FrozenTrial) -> Mapping[str, Any]:
    """The parameters of a trial, on a grid also those that it was given and has not suggested yet."""
    return {**trial.system_attrs.get(POINT_ATTR, {}), **trial.params}


class SharedGrid(BaseSampler):
    """The points of a grid in a random order, each for one trial of the workers that share the grid.

    A trial keeps its point whoever goes on with it, and its retry has the same. A point is done when its
    trial is, unless that FAILed without having run, as when `n_trials` is lowered. Where all points have been
    tried and a slot is still open, they are tried again.
    """

    def __init__(self, space: SearchSpace, seed: int, skipped: Container[str], lock: Lock) -> None:
        values = grid(space)
        names = sorted(values)
        products = itertools.product(*(values[name] for name in names))
        self._points = [dict(zip(names, product, strict=True)) for product in products]
        random.Random(seed).shuffle(self._points)
        self._skipped = skipped
        self._lock = lock

    def precisions_left(self, study: Study) -> list[str]:
        """Of the points that are left to try, the precisions."""
        untried = self._untried(study._get_trials(deepcopy=False)) or self._points
        return list(dict.fromkeys(point[PRECISION] for point in untried if PRECISION in point))

    def _untried(self, trials: Sequence[FrozenTrial]) -> list[dict[str, Any]]:
        tried = {
            tuple(trial.system_attrs[POINT_ATTR].values())
            for trial in trials
            if POINT_ATTR in trial.system_attrs
            and (trial.state != TrialState.FAIL or trial.user_attrs.get("outcome") == Outcome.FAILED)
        }
        return [point for point in self._points if tuple(point.values()) not in tried]

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Give the trial its point. Raises NoPointLeft where those that are left are for other devices."""
        if POINT_ATTR in trial.system_attrs:
            return
        with self._lock():
            trials = study._get_trials(deepcopy=False)
            failed = trial.user_attrs.get("retry_of")
            point = trials[failed].system_attrs.get(POINT_ATTR) if failed is not None else None
            if point is None:
                point = self._choose(trials, trial.system_attrs.get("fixed_params", {}))
            if point is None:
                raise NoPointLeft
            study._storage.set_trial_system_attr(trial._trial_id, POINT_ATTR, point)

    def _choose(self, trials: Sequence[FrozenTrial], fixed: Mapping[str, Any]) -> dict[str, Any] | None:
        """The first point left to try that this worker can run; None: there is none.

        `fixed` are the parameters that a trial was enqueued with: it has them, whatever was tried before.
        """
        untried = self._untried(trials)
        for point in untried + self._points if fixed or not untried else untried:
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
