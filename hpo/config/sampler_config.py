"""Which of Optuna's samplers and pruners a study uses, and their options.

An option is an argument of Optuna's class, by the same name, whose value is a number, a text or a boolean.
Optuna is imported only to check options; `asha` as the default pruner has some.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from hpo.config.study_file import CheckedSection, Problem, show
from hpo.errors import did_you_mean
from hpo.section import Whole, switch, whole

_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("true or false", (bool,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("text", (str,)),
}
_NO_OPTIONS = ("seed", "warn_independent_sampling", "warn_asynchronous_seeding")
"""Arguments of Optuna's classes that are decided otherwise."""


class _Algorithm(CheckedSection):
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

    def problems(self) -> Iterator[Problem]:
        if self.options == self.DEFAULTS.get(self.name, {}):
            return
        import optuna

        algorithm = getattr(getattr(optuna, self.MODULE), self.CLASSES[self.name])
        parameters = inspect.signature(algorithm).parameters
        known = {
            name: kinds
            for name, parameter in parameters.items()
            if name not in _NO_OPTIONS and (kinds := _kinds(parameter.annotation))
        }
        problems = [
            Problem((option,), message)
            for option, value in self.options.items()
            if (message := self._wrong_option(option, value, known))
        ]
        yield from problems
        if not problems:
            wrapped = {"wrapped_pruner": None} if self.name == "patient" else {}
            try:
                with warnings.catch_warnings(action="ignore"):  # building the sampler warns
                    algorithm(**wrapped, **self.options)
            except ValueError as error:
                yield Problem((), f"Optuna refuses the options of {self.name}: {error}")

    def _wrong_option(self, option: str, value: Any, known: Mapping[str, list[str]]) -> str:
        """What is wrong with an option of which Optuna's class takes the `known` kinds of values, or ""."""
        if option not in known:
            hint = did_you_mean(option, [*type(self).model_fields, *known])
            return f"is no option of {self.name}.{hint}"
        kinds = [_KINDS[kind] for kind in known[option]]
        if not any(type(value) in types for _, types in kinds) or value != value:  # NaN
            return f"must be {' or '.join(words for words, _ in kinds)}, but got {show(value)}."
        is_negative = not isinstance(value, str) and value < 0
        return f"must be >= 0, but got {show(value)}." if is_negative else ""


def _kinds(annotation: Any) -> list[str]:
    """`int | None` -> [int]; nothing where a parameter takes what a study file cannot hold."""
    kinds = inspect.formatannotation(annotation).strip("'").removesuffix(" | None").split(" | ")
    return kinds if all(kind in _KINDS for kind in kinds) else []


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

    name: Literal["tpe", "gp", "cmaes", "nsga2", "random", "grid", "qmc"] = "tpe"
    """Optuna's sampler. Options are, for instance, `n_startup_trials` (tpe, gp, cmaes: random trials before
    the sampler learns; 5 for tpe), `n_ei_candidates` and `constant_liar` (tpe), `deterministic_objective`
    (gp), `sigma0` and `popsize` (cmaes), `population_size` (nsga2), `qmc_type` (qmc); see
    <https://optuna.readthedocs.io/en/stable/reference/samplers/index.html>."""
    seed: Whole = Field(42, ge=0, lt=2**31)
    """Seed; worker number n adds n."""


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
