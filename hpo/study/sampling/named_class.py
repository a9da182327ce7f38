"""Samplers and pruners that are not Optuna's own: a class of an installed package, of OptunaHub, or one that
the study's code brings.

    my_package.MySampler                     a class by its import path
    optunahub:samplers/auto_sampler          the only sampler that a package of OptunaHub exports
    optunahub:samplers/x@REF:XSampler        one class of a package, at a commit, tag or branch

A name runs code, so `trust_classes` refuses a name that only the database gives.
"""

from __future__ import annotations

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
"""Environment variable: the folder `package` of a copy of OptunaHub's registry, which is used in place of the
network."""


def trust_classes(config: StudyConfig, of_file: StudyConfig | None) -> None:
    """Raise InputError if the study names a class that this machine's user has not named.

    `of_file` is the study in the user's own file.
    """
    trusted = of_file.class_names if of_file is not None else ()
    for name in config.class_names:
        if name not in trusted and not is_trusted_class(name):
            raise InputError(
                f"The study `{config.name}` of the database asks to run the class `{name}`, which whoever "
                f"can write to the database can change. Read its code, then give --trust-code {name} "
                "(`trust_code=` of hpo.Study), or the study's own file."
            )


def build_named_sampler(config: SamplerConfig, seed: int) -> BaseSampler:
    """Return the sampler. Its class gets `seed` if it takes one. Raises InputError."""
    return GuardedSampler(_build(config, BaseSampler, seed), config.name)


def build_named_pruner(config: PrunerConfig) -> BasePruner:
    """Return the pruner. Raises InputError."""
    return GuardedPruner(_build(config, BasePruner), config.name)


class GuardedSampler(WrapperSampler):
    """Raises RunError, which names the sampler, where it raises or proposes a value outside of its range."""

    def __init__(self, sampler: BaseSampler, name: str) -> None:
        super().__init__(sampler)
        self._name = name

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        with _errors_of("sampler", self._name):
            super().before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        with _errors_of("sampler", self._name):
            return super().infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        with _errors_of("sampler", self._name):
            params = super().sample_relative(study, trial, search_space)
        for name in params.keys() & search_space.keys():
            self._check(name, params[name], search_space[name])
        return params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        with _errors_of("sampler", self._name):
            value = super().sample_independent(study, trial, param_name, param_distribution)
        self._check(param_name, value, param_distribution)
        return value

    def _check(self, name: str, value: Any, distribution: BaseDistribution) -> None:
        if not is_in(distribution, value):
            raise RunError(
                f"The sampler `{self._name}` must propose a value of {distribution} for {name}, but it "
                f"proposed {shorten(repr(value), 60)}."
            )


class GuardedPruner(BasePruner):
    """Raises RunError, which names the pruner, where it raises."""

    def __init__(self, pruner: BasePruner, name: str) -> None:
        self._pruner = pruner
        self._name = name

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        with _errors_of("pruner", self._name):
            return bool(self._pruner.prune(study, trial))


@contextmanager
def _errors_of(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except HpoError:
        raise
    except Exception as error:
        raise RunError(f"The {what} `{name}` failed: {_told(error)}") from error


def _build(config: SamplerConfig | PrunerConfig, base: type[Any], seed: int | None = None) -> Any:
    what, name = config.WHAT, config.name
    own = config.OWN.get(name)
    try:
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            if own is not None:
                made = own.make(options_in(own, config.given_options), *([] if seed is None else [seed]))
            else:
                made = _instance(load_class(name, base, what), config.given_options, seed)
    except HpoError:
        raise
    except Exception as error:
        raise InputError(f"The {what} `{name}` cannot be made: {_told(error)}") from error
    if not isinstance(made, base):
        raise InputError(
            f"The {what} `{name}` must be an instance of optuna's {base.__name__}, but got "
            f"{shorten(repr(made), 60)}."
        )
    return made


def _instance(found: type[Any], options: dict[str, Any], seed: int | None) -> Any:
    takes_seed = seed is not None and "seed" in inspect.signature(found).parameters
    return found(**options, **({"seed": seed} if takes_seed else {}))


def load_class(name: str, base: type[Any], what: str) -> type[Any]:
    """Import the class that `name` names. Raises InputError unless it is a subclass of `base`.

    Args:
        what: `sampler` or `pruner`, for messages.
    """
    if name.startswith(HUB):
        found = _class_of_hub(name, base, what)
    else:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(import_module(module), attribute, None)
        except Exception as error:
            raise InputError(f"The {what} `{name}` cannot be imported: {_told(error)}") from error
        if found is None:
            raise InputError(f"The {what} `{name}`: the module `{module}` has no `{attribute}`.")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InputError(
            f"The {what} `{name}` must be a subclass of optuna's {base.__name__}, but it is "
            f"{shorten(repr(found), 80)}."
        )
    return found


def _class_of_hub(name: str, base: type[Any], what: str) -> Any:
    match = re.fullmatch(rf"{HUB}([\w/-]+)(?:@([\w./-]+))?(?::(\w+))?", name)
    assert match is not None, name  # `is_class_name`
    package, ref, attribute = match.groups()
    module = _hub_module(name, package, ref, what)
    if attribute is not None:
        return getattr(module, attribute, None)
    exported = getattr(module, "__all__", None)
    values = [getattr(module, key, None) for key in exported or vars(module)]
    classes = [value for value in values if isinstance(value, type) and issubclass(value, base)]
    # Without `__all__` a module also shows the classes that it imports from Optuna.
    own = [value for value in classes if exported or value.__module__.startswith(module.__name__)]
    if len(own) != 1:
        named = ", ".join(value.__name__ for value in own) or "none"
        raise InputError(
            f"The {what} `{name}` must name a package with one {what}, but it has {named}. Name its class: "
            f"`{name}:CLASS`."
        )
    return own[0]


def _hub_module(name: str, package: str, ref: str | None, what: str) -> ModuleType:
    try:
        import optunahub
    except ImportError as error:
        raise InputError(
            f"The {what} `{name}` needs the package optunahub, which is not installed ({error}). "
            f"{install_hint('optunahub')}"
        ) from None
    registry = os.environ.get(REGISTRY)
    try:
        with warnings.catch_warnings(action="ignore"):
            if registry:
                module = optunahub.load_local_module(package, registry_root=str(Path(registry).absolute()))
            else:
                module = optunahub.load_module(package, ref=ref or "main")
    except Exception as error:
        where = f"from the folder {registry} ({REGISTRY})" if registry else "from OptunaHub"
        raise InputError(
            f"The {what} `{name}` cannot be loaded {where}: {_told(error)} Without a network, name a copy of "
            f"the registry's folder `package` in {REGISTRY}."
        ) from error
    assert isinstance(module, ModuleType)
    return module


def _told(error: Exception) -> str:
    text = f"{type(error).__name__}: {shorten(str(error), 300)}"
    return text if text.endswith(".") else f"{text}."
