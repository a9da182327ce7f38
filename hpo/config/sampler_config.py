"""Which of Optuna's samplers and pruners a study uses, and their options.

An option is an argument of Optuna's class, by the same name, whose value is a number, a text or a boolean.
Optuna is imported only to check options; `asha` as the default pruner has some.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from hpo.config.study_file import Problem, refuse, show
from hpo.errors import did_you_mean
from hpo.section import Section, Switch, Whole

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_KINDS: dict[str, tuple[str, TypeAdapter[Any]]] = {
    "bool": ("true or false", TypeAdapter(Switch, config=_STRICT)),
    "int": ("a whole number >= 0", TypeAdapter(Annotated[Whole, Field(ge=0)], config=_STRICT)),
    "float": ("a number >= 0", TypeAdapter(Annotated[float, Field(ge=0)], config=_STRICT)),
    "str": ("text", TypeAdapter(str, config=_STRICT)),
}
"""What an option must be, by the annotation of Optuna's argument."""
_NO_OPTIONS = ("seed", "warn_independent_sampling", "warn_asynchronous_seeding")
"""Arguments of Optuna's classes that are decided otherwise."""


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
    def _check_options(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        fields = {key: value for key, value in data.items() if key in cls.model_fields}
        given = {key: value for key, value in data.items() if key not in fields and value is not None}
        name = fields.get("name", cls.model_fields["name"].default)
        if not isinstance(name, str) or name not in cls.CLASSES:
            return fields  # which refuses the name
        defaults = cls.DEFAULTS.get(name, {})
        options = defaults | given
        return fields | (options if options == defaults else cls._checked(name, options))

    @classmethod
    def _checked(cls, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options in the form in which Optuna's class takes them."""
        import optuna

        algorithm = getattr(getattr(optuna, cls.MODULE), cls.CLASSES[name])
        arguments = inspect.signature(algorithm).parameters.values()
        kinds = {arg.name: _kinds(arg.annotation) for arg in arguments if arg.name not in _NO_OPTIONS}
        known = [*cls.model_fields, *(option for option in kinds if kinds[option])]
        checked: dict[str, Any] = {}
        problems = []
        for option, value in options.items():
            try:
                if option not in known:
                    raise ValueError(f"is no option of {name}.{did_you_mean(option, known)}")
                checked[option] = _option_value(kinds[option], value)
            except ValueError as error:
                problems.append(Problem((option,), str(error)))
        refuse(*problems)
        wrapped = {"wrapped_pruner": None} if name == "patient" else {}
        try:
            with warnings.catch_warnings(action="ignore"):  # building the sampler warns
                algorithm(**wrapped, **checked)
        except ValueError as error:
            raise ValueError(f"Optuna refuses the options of {name}: {error}") from None
        return checked


def _kinds(annotation: Any) -> list[str]:
    """`int | None` -> [int]; nothing where a parameter takes what a study file cannot hold."""
    kinds = inspect.formatannotation(annotation).strip("'").removesuffix(" | None").split(" | ")
    return kinds if all(kind in _KINDS for kind in kinds) else []


def _option_value(kinds: Sequence[str], value: Any) -> Any:
    for kind in kinds:
        with suppress(ValidationError):
            return _KINDS[kind][1].validate_python(value)
    raise ValueError(f"must be {' or '.join(_KINDS[kind][0] for kind in kinds)}, but got {show(value)}.")


class SamplerConfig(_Algorithm):
    """Which configuration is tried next. Further keys are the options of Optuna's class."""

    MODULE: ClassVar[str] = "samplers"
    CLASSES: ClassVar[dict[str, str]] = {
        "tpe": "TPESampler",
        "gp": "GPSampler",
        "nsga2": "NSGAIISampler",
        "random": "RandomSampler",
        "grid": "GridSampler",
        "qmc": "QMCSampler",
    }
    # Optuna's 10 are half of a study of 20 trials.
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]] = {"tpe": {"n_startup_trials": 5}}

    name: Literal["tpe", "gp", "nsga2", "random", "grid", "qmc"] = "tpe"
    """Optuna's sampler. Options are, for instance, `n_startup_trials` (tpe, gp: random trials before the
    sampler learns; 5 for tpe), `n_ei_candidates` and `constant_liar` (tpe), `deterministic_objective`
    (gp), `population_size` (nsga2), `qmc_type` (qmc); see
    <https://optuna.readthedocs.io/en/stable/reference/samplers/index.html>."""
    seed: Whole = Field(42, ge=0, lt=2**31)
    """Seed; worker number n adds n."""

    @field_validator("name", mode="before")
    @classmethod
    def _refuse_cmaes(cls, name: Any) -> Any:
        if name == "cmaes":
            raise ValueError("cmaes draws categories, such as precisions, at random. Use tpe, gp or nsga2.")
        return name


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

    name: Literal["hyperband", "asha", "median", "percentile", "patient", "none"] = "none"
    """Optuna's pruner; `none` with several objectives. Options are, for instance, `min_resource` and
    `reduction_factor` (hyperband, asha: evaluations of the first rung, and of how many trials one goes on),
    `n_startup_trials` and `n_warmup_steps` (median, percentile), `percentile` (25), `patience` (patient; 2);
    see <https://optuna.readthedocs.io/en/stable/reference/pruners.html>."""
