"""Which configuration is tried next, and when a trial stops early: Optuna's samplers and pruners.

A worker draws only what its device can run: `device_sampler`. A precision that runs and still cannot work
must not eat the budget either, and each sampler needs help of its own with that, because such a trial ends
as PRUNED with an infeasible constraint (see `leases`):

- TPE ranks infeasible trials last, but its first trials are random, as are all trials of NSGA-II's first
  generation and its mutations. `InfeasibleFilterSampler` replaces a choice of which every trial was
  infeasible.
- GP looks at COMPLETE trials only. `PrunedAwareSampler` shows it a copy of the study.

Random, grid and QMC do not learn and are left as they are, as is CMA-ES, which draws categories at random:
with them, such a trial ends before training.

TPE and GP come back to what they found good: on a grid, to the very same configuration. `AvoidRepeats`
changes that. GP is told the order of choices that are numbers: `[8, 16, 32]` has a middle.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from hpo.config.search_space import Distribution, grid, is_finite
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION
from hpo.study.device_sampler import ANY_DEVICE, DeviceSampler, WorkerDevice
from hpo.study.feasible_sampler import AvoidRepeats, InfeasibleFilterSampler
from hpo.study.gp_sampler import PrunedAwareSampler

if TYPE_CHECKING:
    from hpo.config.sampler_config import PrunerConfig, SamplerConfig

Lock = Callable[[], AbstractContextManager[None]]

POINT_ATTR = "hpo:grid"
"""System attribute of a trial: its point of the grid."""


def build_sampler(
    config: SamplerConfig,
    space: Mapping[str, Distribution],
    *,
    worker_number: int = 0,
    device: WorkerDevice = ANY_DEVICE,
    skipped: Container[str] = (),
    lock: Lock = nullcontext,
) -> BaseSampler:
    """Return Optuna's sampler of that name for one worker of a study.

    Args:
        worker_number: added to the seed. Two workers with the same seed would try the same configurations;
            only `grid` and `qmc` continue one sequence among all workers and need the same seed for it.
        skipped: precisions that this worker does not draw.
        lock: held while a point of the grid is chosen, so that no two workers choose the same.
    """
    seed = (config.seed + worker_number) % 2**32
    choices: tuple[Any, ...] = space[PRECISION].grid() if PRECISION in space else ()
    # Where a device runs no choice, `run_worker` asks for no proposal.
    runnable = [choice for choice in choices if choice not in skipped] or choices
    drawn = dict(space)
    if choices:
        drawn[PRECISION] = space[PRECISION].model_copy(update={"choices": tuple(runnable)})
    if config.name == "grid":
        return SharedGrid(space, config.seed, skipped, lock)
    with _quiet():
        sampler = _optuna_sampler(config, drawn, seed)
    models_choices = config.name in ("tpe", "gp")
    return DeviceSampler(sampler, device, choices, runnable, models_choices=models_choices)


def _quiet() -> AbstractContextManager[object]:
    """Some of Optuna's samplers and pruners call themselves experimental; the user chose them by name."""
    return warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning)


def _optuna_sampler(config: SamplerConfig, space: Mapping[str, Distribution], seed: int) -> BaseSampler:
    options = config.options
    if config.name in ("gp", "cmaes", "qmc"):
        options["warn_independent_sampling"] = False
    independent = optuna.samplers.RandomSampler(seed=seed)
    match config.name:
        case "tpe":
            return _feasible(optuna.samplers.TPESampler(seed=seed, **options), space, seed)
        case "gp":
            gp = optuna.samplers.GPSampler(seed=seed, **options)
            return _feasible(PrunedAwareSampler(gp), space, seed)
        case "nsga2":
            return InfeasibleFilterSampler(optuna.samplers.NSGAIISampler(seed=seed, **options), seed)
        case "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed, independent_sampler=independent, **options)
        case "qmc":
            return optuna.samplers.QMCSampler(seed=config.seed, independent_sampler=independent, **options)
        case _:
            return independent


def _feasible(sampler: BaseSampler, space: Mapping[str, Distribution], seed: int) -> BaseSampler:
    feasible = InfeasibleFilterSampler(sampler, seed)
    return AvoidRepeats(feasible, space, seed) if is_finite(space) else feasible


def build_pruner(config: PrunerConfig) -> BasePruner:
    """Return Optuna's pruner of that name. Steps are evaluations."""
    pruners: dict[str, Callable[..., BasePruner]] = {
        "hyperband": optuna.pruners.HyperbandPruner,
        "asha": optuna.pruners.SuccessiveHalvingPruner,
        "median": optuna.pruners.MedianPruner,
        "percentile": optuna.pruners.PercentilePruner,
        "patient": partial(optuna.pruners.PatientPruner, None),
        "none": optuna.pruners.NopPruner,
    }
    with _quiet():
        return pruners[config.name](**config.options)


class NoPointLeft(Exception):
    """Every point of the grid that this worker can run has been tried; see `SharedGrid`."""


class SharedGrid(BaseSampler):
    """The points of a grid in a random order, each for one trial of the workers that share the grid.

    Optuna's own gives points to trials by number, whatever the worker can run, and may give one twice.
    A point is done when its trial is, unless that FAILed without having run, as when `n_trials` is lowered.
    """

    def __init__(
        self,
        space: Mapping[str, Distribution],
        seed: int,
        skipped: Container[str] = (),
        lock: Lock = nullcontext,
    ) -> None:
        values = grid(space)
        names = sorted(values)
        products = itertools.product(*(values[name] for name in names))
        self._points = [dict(zip(names, product, strict=True)) for product in products]
        random.Random(seed).shuffle(self._points)
        self._skipped = skipped
        self._lock = lock

    def precisions_left(self, study: Study) -> list[str]:
        """Of the points that no trial has, the precisions."""
        return list(dict.fromkeys(point[PRECISION] for point in self._untried(study) if PRECISION in point))

    def _untried(self, study: Study) -> list[dict[str, Any]]:
        tried = {
            tuple(trial.system_attrs[POINT_ATTR].values())
            for trial in study._get_trials(deepcopy=False)
            if POINT_ATTR in trial.system_attrs
            and (trial.state != TrialState.FAIL or trial.user_attrs.get("outcome") == Outcome.FAILED)
        }
        return [point for point in self._points if tuple(point.values()) not in tried]

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Give the trial its point. Raises NoPointLeft where those that are left are for other devices."""
        point = trial.system_attrs.get(POINT_ATTR)
        if "fixed_params" in trial.system_attrs or (
            point is not None and (self._runs(point) or PRECISION in trial.params)
        ):
            return
        with self._lock():
            untried = self._untried(study)
            left = [p for p in untried if self._fits(p, trial)]
            if untried and not left and not trial.params:
                raise NoPointLeft
            # One that another device's worker began before it had a precision may have to repeat a point.
            chosen = next(p for p in [*left, *self._points] if self._fits(p, trial))
            study._storage.set_trial_system_attr(trial._trial_id, POINT_ATTR, chosen)

    def _fits(self, point: Mapping[str, Any], trial: FrozenTrial) -> bool:
        return self._runs(point) and trial.params.items() <= point.items()

    def _runs(self, point: Mapping[str, Any]) -> bool:
        return point.get(PRECISION) not in self._skipped

    def infer_relative_search_space(self, *_: object) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, *_: object) -> dict[str, Any]:
        return {}

    def sample_independent(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,  # noqa: ARG002
    ) -> Any:
        return trial.system_attrs[POINT_ATTR][param_name]
