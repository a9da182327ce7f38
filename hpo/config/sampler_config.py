"""Which of Optuna's samplers and pruners a study uses, and their options.

An option is an argument of Optuna's class, by the same name, whose value is a number, a text or a boolean.
Optuna is imported only to check options that a study gives.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from hpo.config.study_file import Problem, show, validation_error
from hpo.errors import did_you_mean
from hpo.section import Section, Whole, switch, whole

_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "str": (str, "text"),
    "None": (type(None), ""),
}
_OURS = ("seed", "warn_independent_sampling", "warn_asynchronous_seeding")
"""Arguments of Optuna's classes that are no options: `build_sampler` gives them."""


class _Algorithm(Section):
    """A named algorithm of Optuna's; its further keys are options."""

    model_config = ConfigDict(extra="allow")
    MODULE: ClassVar[str]
    CLASSES: ClassVar[dict[str, str]]
    """The class in `optuna.MODULE` of each name."""
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]]
    """Options with another default than Optuna's, and those for which Optuna has none."""
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options as keyword arguments of Optuna's class."""
        return dict(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _add_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        fields = {key: value for key, value in data.items() if key in cls.model_fields}
        options = {key: whole(switch(value)) for key, value in data.items() if key not in fields}
        name = fields.get("name", cls.model_fields["name"].default)
        defaults = cls.DEFAULTS.get(name, {}) if isinstance(name, str) else {}
        return fields | defaults | {key: value for key, value in options.items() if value is not None}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.options != self.DEFAULTS.get(self.name, {}) and (problems := self._problems()):
            raise validation_error(problems)
        return self

    def _problems(self) -> list[Problem]:
        import optuna

        algorithm = getattr(getattr(optuna, self.MODULE), self.CLASSES[self.name])
        parameters = inspect.signature(algorithm).parameters
        kinds = {name: _kinds(parameter.annotation) for name, parameter in parameters.items()}
        known = [name for name, of_parameter in kinds.items() if of_parameter and name not in _OURS]
        problems = []
        for option, value in self.options.items():
            if option not in known:
                hint = did_you_mean(option, [*type(self).model_fields, *known])
                problems.append(Problem((option,), f"is no option of {self.name}.{hint}"))
            elif must_be := _wrong_value(value, kinds[option]):
                problems.append(Problem((option,), f"must be {must_be}, but got {show(value)}."))
        if not problems:
            # What else Optuna's class takes, a pruner inside a pruner, is None.
            required = {
                name: None
                for name, parameter in parameters.items()
                if parameter.default is parameter.empty and name not in known
            }
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # building the sampler warns
                    algorithm(**required, **self.options)
            except ValueError as error:
                problems.append(Problem((), f"Optuna refuses the options of {self.name}: {error}"))
        return problems


def _kinds(annotation: Any) -> tuple[str, ...]:
    """`int | None` -> (int, None); nothing where a parameter takes what a study file cannot hold."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    kinds = tuple(text.split(" | "))
    return kinds if all(kind in _KINDS for kind in kinds) else ()


def _wrong_value(value: Any, kinds: tuple[str, ...]) -> str:
    """What the value of an option must be; empty where it is."""
    fits = [
        isinstance(value, _KINDS[kind][0]) and (kind == "bool" or not isinstance(value, bool))
        for kind in kinds
    ]
    if not any(fits) or value != value:  # NaN
        return " or ".join(_KINDS[kind][1] for kind in kinds if kind != "None")
    return ">= 0" if not isinstance(value, str) and value < 0 else ""


class SamplerConfig(_Algorithm):
    """Which configuration is tried next. Further keys are the options of Optuna's class."""

    MODULE: ClassVar[str] = "samplers"
    CLASSES: ClassVar[dict[str, str]] = {
        "tpe": "TPESampler",
        "gp": "GPSampler",
        "cmaes": "CmaEsSampler",
        "nsga2": "NSGAIISampler",
        "random": "RandomSampler",
        "grid": "GridSampler",
        "qmc": "QMCSampler",
    }
    # Optuna's 10 are half of a study of 20 trials; tests/benchmarks/search_speed.py compares them.
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]] = {"tpe": {"n_startup_trials": 5}}

    name: Literal["tpe", "gp", "cmaes", "nsga2", "random", "grid", "qmc"] = Field(
        "tpe",
        description="Optuna's sampler. Options are, for instance, `n_startup_trials` (tpe, gp, cmaes: random "
        "trials before the sampler learns; 5 for tpe), `n_ei_candidates` and `constant_liar` (tpe), "
        "`deterministic_objective` (gp), `sigma0` and `popsize` (cmaes), `population_size` (nsga2), "
        "`qmc_type` (qmc); see <https://optuna.readthedocs.io/en/stable/reference/samplers/index.html>.",
    )
    seed: Whole = Field(42, ge=0, lt=2**31, description="Seed; worker number n adds n.")


class PrunerConfig(_Algorithm):
    """When a trial stops early. Steps are evaluations; further keys are the options of Optuna's class."""

    MODULE: ClassVar[str] = "pruners"
    CLASSES: ClassVar[dict[str, str]] = {
        "hyperband": "HyperbandPruner",
        "asha": "SuccessiveHalvingPruner",
        "median": "MedianPruner",
        "percentile": "PercentilePruner",
        "patient": "PatientPruner",
        "none": "NopPruner",
    }
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]] = {
        "percentile": {"percentile": 25.0},
        "patient": {"patience": 2},
    }

    name: Literal["hyperband", "asha", "median", "percentile", "patient", "none"] = Field(
        "none",
        description="Optuna's pruner; `none` with several objectives. Options are, for instance, "
        "`min_resource` and `reduction_factor` (hyperband, asha: evaluations of the first rung, and of how "
        "many trials one goes on), `n_startup_trials` and `n_warmup_steps` (median, percentile), "
        "`percentile` (25), `patience` (patient; 2); see "
        "<https://optuna.readthedocs.io/en/stable/reference/pruners.html>.",
    )
