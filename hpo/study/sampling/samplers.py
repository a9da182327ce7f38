"""Optuna's samplers and pruners, in wrappers that learn from infeasible trials.

An infeasible precision ends a trial as PRUNED with an infeasible constraint. TPE ranks such trials last, but
its first trials are random, as are NSGA-II's first generation and its mutations: `InfeasibleFilterSampler`
replaces a choice whose trials were all infeasible. GP uses only COMPLETE trials: `PrunedAwareSampler` shows
it a copy of the study, and also TPE if trials pause by several objectives. With random and QMC, such a trial
ends before training.

TPE and GP return to a good configuration: `AvoidRepeats` changes that. The points of a grid are chosen with
the claim of a trial (`points`); a sampler draws only the settings outside them.
"""

import random
import warnings
from collections.abc import Container, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from hpo.config.sampler_config import PrunerConfig, SamplerConfig
from hpo.config.search_space import SearchSpace, choices_without, suggest
from hpo.config.study_config import StudyConfig
from hpo.errors import InputError, RunError
from hpo.precision.table import BASE_PRECISION, PRECISION, choice_name
from hpo.study.sampling.device_sampler import ANY_DEVICE, DeviceSampler, WorkerDevice, WrapperSampler
from hpo.study.sampling.feasible_sampler import AvoidRepeats, InfeasibleFilterSampler
from hpo.study.sampling.gp_sampler import PrunedAwareSampler
from hpo.study.sampling.named_class import build_named_pruner, build_named_sampler, trust_classes

TRIED = 3  # number of trials for testing a sampler of other code: the first are random in many samplers

MOST_VALUES = 10_000  # with more values of all settings together, repeats are rare


def build_sampler(
    config: SamplerConfig,
    space: SearchSpace,
    *,
    worker_number: int = 0,
    device: WorkerDevice = ANY_DEVICE,
    skipped: Container[str] = (),
    explores: bool = False,
) -> BaseSampler:
    """Return the sampler of one worker of a study, without the `skipped` precisions.

    `worker_number` is added to the seed, so that all workers try different configurations. The workers of
    `qmc` continue one sequence, without a seed. With `explores`, TPE and GP draw half at random.
    """
    drawn = _drawn_space(space, skipped)
    models = config.name in ("tpe", "gp")
    seed = config.seed + worker_number
    sampler = _build_optuna_sampler(config, drawn, seed, explores=explores and models)
    return DeviceSampler(sampler, device, space, drawn, models_choices=models)


def _drawn_space(space: SearchSpace, skipped: Container[str]) -> SearchSpace:
    """Return the space without the precisions `skipped`; with all of them if the worker can run none.

    If a device runs no choice of a conditional setting, it draws trials without this setting.
    """
    drawn = dict(space)
    for name in filter(space.__contains__, (PRECISION, BASE_PRECISION)):
        one = space[name]
        choices = one.grid()
        runnable = tuple(value for value in choices if choice_name(name, value) not in skipped)
        drawn[name] = one.model_copy(update={"choices": runnable or choices})
        others = {} if runnable else choices_without(space, one)
        for parent, without in [*others.items()][:1]:
            drawn[parent] = drawn[parent].model_copy(update={"choices": without})
    return drawn


def _build_optuna_sampler(
    config: SamplerConfig, space: SearchSpace, seed: int, *, explores: bool
) -> BaseSampler:
    if not config.is_optuna_own:
        return InfeasibleFilterSampler(build_named_sampler(config, seed), seed)
    name, options = config.name, config.options
    if name in ("gp", "qmc"):
        options["warn_independent_sampling"] = False
    if name == "qmc":
        options["independent_sampler"] = RandomSampler(seed=seed)
    options["seed"] = seed
    if name == "grid":
        return RandomSampler(seed=seed)
    sampler: BaseSampler = _build(optuna.samplers, config, options)
    if name == "gp" or explores:
        sampler = PrunedAwareSampler(sampler, 1 if name == "gp" else 2)
    if explores:
        sampler = HalfRandom(sampler, seed)
    if name not in ("tpe", "gp", "nsga2"):
        return sampler
    feasible = InfeasibleFilterSampler(sampler, seed)
    may_repeat = name != "nsga2" and sum(one.size for one in space.values()) <= MOST_VALUES
    return AvoidRepeats(feasible, space, seed) if may_repeat else feasible


class HalfRandom(WrapperSampler):
    """Draws half of the configurations at random, chosen by the trial's number.

    The best start is not always the best end, and a sampler that learns from short starts follows them. BOHB
    draws every third at random (Falkner et al., 2018, https://arxiv.org/abs/1807.01774).
    """

    def __init__(self, sampler: BaseSampler, seed: int) -> None:
        super().__init__(sampler)
        self._seed = seed
        # The first trials of `sampler` are random too, so this needs another sequence.
        self._random_sampler = RandomSampler(seed=random.Random(f"half at random {seed}").getrandbits(32))

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._is_random = random.Random(f"{self._seed} {trial.number}").random() < 0.5
        if not self._is_random:
            super().before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {} if self._is_random else super().infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {} if self._is_random else super().sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        sampler = self._random_sampler if self._is_random else self._sampler
        return sampler.sample_independent(study, trial, param_name, param_distribution)


def build_pruner(config: PrunerConfig) -> BasePruner:
    """Return the pruner. For `promote` it stops no trial, as trials pause by themselves."""
    if not config.is_optuna_own:
        return build_named_pruner(config)
    wrapped = {"wrapped_pruner": None} if config.name == "patient" else {}
    options = {} if config.name == "promote" else config.options | wrapped
    pruner: BasePruner = _build(optuna.pruners, config, options)
    return pruner


def _build(module: Any, config: SamplerConfig | PrunerConfig, options: Mapping[str, Any]) -> Any:
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        return getattr(module, config.CLASSES[config.name])(**options)


def check_named(config: StudyConfig, of_file: StudyConfig | None) -> None:
    """Try a sampler and a pruner of other code on a few trials of a study in memory. Raises InputError.

    `of_file` is the study in the user's own file, which may name classes (`trust_classes`).
    """
    trust_classes(config, of_file)
    if config.sampler.is_optuna_own and config.pruner.is_optuna_own:
        return
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler, pruner = build_sampler(config.sampler, config.search_space), build_pruner(config.pruner)
    study = optuna.create_study(directions=config.directions, sampler=sampler, pruner=pruner)
    try:
        for number in range(TRIED):
            trial = study.ask()
            suggest(config.search_space, trial)
            if len(config.directions) == 1:
                trial.report(number, step=1)
                trial.should_prune()
            study.tell(trial, [number] * len(config.directions))
    except RunError as error:
        raise InputError(f"{error} This was a try in memory, before the study begins.") from error
