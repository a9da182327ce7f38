"""Samplers and pruners by the name of a class: of an installed package, of OptunaHub, or of the study's code.

    my_package.MySampler                     a class by its import path
    optunahub:samplers/auto_sampler          the only sampler of a package of OptunaHub
    optunahub:samplers/x@REF:XSampler        one class of a package, at a commit, tag or branch

A name runs code, so `trust_classes` refuses a name from the database.
"""

import inspect
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from hpo.code import HUB, is_trusted_class
from hpo.config.sampler_config import PrunerConfig, SamplerConfig
from hpo.config.study_config import StudyConfig
from hpo.errors import HpoError, InputError, RunError, shorten
from hpo.extensions import options_in
from hpo.study.sampling.device_sampler import WrapperSampler
from hpo.study.store.optuna_internals import is_in
from hpo.versions import install_hint

REGISTRY = "HPO_OPTUNAHUB_REGISTRY"
"""Environment variable: folder `package` of a copy of OptunaHub's registry, for use without a network."""


def trust_classes(config: StudyConfig, of_file: StudyConfig | None) -> None:
    """Raise InputError if the study names a class without consent: in the user's own file `of_file`, or by an
    option.
    """
    trusted = of_file.class_names if of_file is not None else ()
    for name in config.class_names:
        if name not in trusted and not is_trusted_class(name):
            raise InputError(
                f"The study `{config.name}` of the database asks to run the class `{name}`. Anybody with "
                f"write access to the database can change this. Read its code, then give --trust-code {name} "
                "(`trust_code=` of hpo.Study), or the study's own file."
            )


def build_named_sampler(config: SamplerConfig, seed: int) -> BaseSampler:
    """Return the sampler. Its class gets `seed` if it takes one. Raises InputError."""
    return GuardedSampler(_build(config, BaseSampler, seed), config.name)


def build_named_pruner(config: PrunerConfig) -> BasePruner:
    return GuardedPruner(_build(config, BasePruner), config.name)


class GuardedSampler(WrapperSampler):
    """Raises RunError with the sampler's name if it fails or proposes a value out of range."""

    def __init__(self, sampler: BaseSampler, name: str) -> None:
        super().__init__(sampler)
        self._name = f"sampler `{name}`"

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        with _errors_of(self._name):
            super().before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        with _errors_of(self._name):
            return super().infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        with _errors_of(self._name):
            params = super().sample_relative(study, trial, search_space)
        for name in params.keys() & search_space.keys():
            self._check(name, params[name], search_space[name])
        return params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        with _errors_of(self._name):
            value = super().sample_independent(study, trial, param_name, param_distribution)
        self._check(param_name, value, param_distribution)
        return value

    def _check(self, name: str, value: Any, distribution: BaseDistribution) -> None:
        if not is_in(distribution, value):
            raise RunError(
                f"The {self._name} must propose a value of {distribution} for {name}, but it proposed "
                f"{shorten(repr(value), 60)}."
            )


class GuardedPruner(BasePruner):
    """Raises RunError with the pruner's name if it fails."""

    def __init__(self, pruner: BasePruner, name: str) -> None:
        self._pruner = pruner
        self._name = f"pruner `{name}`"

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        with _errors_of(self._name):
            return bool(self._pruner.prune(study, trial))


@contextmanager
def _errors_of(name: str, what: str = "failed", kind: type[HpoError] = RunError) -> Iterator[None]:
    try:
        yield
    except HpoError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {shorten(str(error), 300)}".removesuffix(".")
        raise kind(f"The {name} {what}: {text}.") from error


def _build(config: SamplerConfig | PrunerConfig, base: type[Any], seed: int | None = None) -> Any:
    name, own = f"{config.WHAT} `{config.name}`", config.OWN.get(config.name)
    with (
        warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning),
        _errors_of(name, "cannot be made", InputError),
    ):
        if own is not None:
            made = own.make(options_in(own, config.given_options), *([] if seed is None else [seed]))
        else:
            named = load_class(config.name, base, config.WHAT)
            takes_seed = seed is not None and "seed" in inspect.signature(named).parameters
            made = named(**config.given_options, **({"seed": seed} if takes_seed else {}))
    if not isinstance(made, base):
        raise InputError(
            f"The {name} must be an instance of optuna's {base.__name__}, but got {shorten(repr(made), 60)}."
        )
    return made


def load_class(name: str, base: type[Any], what: str) -> type[Any]:
    """Import a class by its name. Raises InputError unless it is a subclass of `base`."""
    if name.startswith(HUB):
        named = _class_of_hub(name, base, what)
    else:
        module, _, attribute = name.rpartition(".")
        with _errors_of(f"{what} `{name}`", "cannot be imported", InputError):
            named = getattr(import_module(module), attribute, None)
        if named is None:
            raise InputError(f"The {what} `{name}`: the module `{module}` has no `{attribute}`.")
    if not (isinstance(named, type) and issubclass(named, base)):
        raise InputError(
            f"The {what} `{name}` must be a subclass of optuna's {base.__name__}, but it is "
            f"{shorten(repr(named), 80)}."
        )
    return named


def _class_of_hub(name: str, base: type[Any], what: str) -> Any:
    match = re.fullmatch(rf"{HUB}([\w/-]+)(?:@([\w./-]+))?(?::(\w+))?", name)
    assert match is not None, name  # `is_class_name`
    package, ref, attribute = match.groups()
    module = _hub_module(f"{what} `{name}`", package, ref)
    if attribute is not None:
        return getattr(module, attribute, None)
    exported = getattr(module, "__all__", None)
    values = [getattr(module, key, None) for key in exported or vars(module)]
    classes = [value for value in values if isinstance(value, type) and issubclass(value, base)]
    # Without `__all__` a module also shows the classes that it imports from Optuna.
    own = [value for value in classes if exported or value.__module__.startswith(module.__name__)]
    if len(own) != 1:
        names = ", ".join(value.__name__ for value in own) or "none"
        raise InputError(
            f"The {what} `{name}` must name a package with one {what}, but it has {names}. Name its class: "
            f"`{name}:CLASS`."
        )
    return own[0]


def _hub_module(name: str, package: str, ref: str | None) -> ModuleType:
    try:
        import optunahub
    except ImportError as error:
        raise InputError(
            f"The {name} needs the package optunahub, which is not installed ({error}). "
            f"{install_hint('optunahub')}"
        ) from None
    registry = os.environ.get(REGISTRY)
    where = f"from the folder {registry}" if registry else "from OptunaHub"
    remedy = f"(without a network, name a copy of the registry's folder `package` in {REGISTRY})"
    with (
        warnings.catch_warnings(action="ignore"),
        _errors_of(name, f"cannot be loaded {where} {remedy}", InputError),
    ):
        if registry:
            module = optunahub.load_local_module(package, registry_root=str(Path(registry).absolute()))
        else:
            module = optunahub.load_module(package, ref=ref or "main")
    assert isinstance(module, ModuleType)
    return module
