"""Which of Optuna's samplers and pruners a study uses, with those of their options that it may set.

Options have the names that they have in Optuna, and each sampler or pruner takes only its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hpo.config.study_file import Problem, validation_error
from hpo.config.trial_settings import Count, Section, Switch
from hpo.errors import InputError


class _Choice(Section):
    """A named algorithm of Optuna with its options; each name takes some of the options."""

    OPTIONS: ClassVar[dict[str, tuple[str, ...]]]
    name: str

    @model_validator(mode="after")
    def _check_options(self) -> _Choice:
        allowed = self.OPTIONS[self.name]
        takes = f"{self.name} takes {', '.join(allowed)}." if allowed else f"{self.name} takes none."
        problems = [
            Problem((option,), f"is not an option of {self.name}; {takes}")
            for option in type(self).model_fields
            if option not in ("name", "seed", *allowed) and getattr(self, option) is not None
        ]
        if problems:
            raise validation_error(problems)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options that the study gives, as keyword arguments of Optuna's class."""
        return self.model_dump(exclude={"name", "seed"}, exclude_none=True)

    def definition(self) -> dict[str, Any]:
        """As JSON, with the values of all options that are not Optuna's own defaults."""
        return self.model_dump(mode="json", include={"name", "seed"}) | self.options

    def completed(self, stored: Mapping[str, Any]) -> Self:
        """With what is left out here as in `stored`, a `definition`, if that names the same algorithm.

        Raises InputError where options of the default algorithm are given and another is stored.
        """
        given = self.model_dump(exclude_unset=True)
        name = stored["name"]
        if given.get("name", name) != name:
            return self
        foreign = [key for key in given if key not in ("name", "seed", *self.OPTIONS[name])]
        if foreign:
            raise InputError(
                f"`{foreign[0]}` is no option of `{name}`, which the stored study uses and the study file "
                "does not change. Give the `name` of the algorithm beside it."
            )
        known = {key: value for key, value in stored.items() if value is not None}
        return type(self).model_validate(known | given)


class SamplerConfig(_Choice):
    """Which configuration is tried next. Options left out are Optuna's defaults, but where they say so."""

    OPTIONS: ClassVar[dict[str, tuple[str, ...]]] = {
        "tpe": ("n_startup_trials", "n_ei_candidates", "multivariate", "constant_liar"),
        "gp": ("n_startup_trials", "deterministic_objective"),
        "cmaes": ("n_startup_trials", "sigma0", "popsize"),
        "nsga2": ("population_size", "mutation_prob", "crossover_prob", "swapping_prob"),
        "random": (),
        "grid": (),
        "qmc": ("qmc_type", "scramble"),
    }
    name: Literal["tpe", "gp", "cmaes", "nsga2", "random", "grid", "qmc"] = Field(
        "tpe", description="Optuna's sampler."
    )
    seed: int = Field(42, ge=0, lt=2**31, description="Seed; worker number n adds n.")
    n_startup_trials: Annotated[int, Field(ge=0)] | None = Field(
        None, description="tpe, gp, cmaes: random trials before the sampler learns; left out, tpe has 5."
    )
    n_ei_candidates: Count | None = Field(None, description="tpe: candidates compared for one suggestion.")
    multivariate: Switch | None = Field(None, description="tpe: model the settings together.")
    constant_liar: Switch | None = Field(None, description="tpe: keep parallel workers apart.")
    deterministic_objective: Switch | None = Field(None, description="gp: results have no noise.")
    sigma0: Annotated[float, Field(gt=0)] | None = Field(None, description="cmaes: first step size.")
    popsize: Annotated[int, Field(ge=2)] | None = Field(None, description="cmaes: trials in a generation.")
    population_size: Annotated[int, Field(ge=2)] | None = Field(
        None, description="nsga2: trials in a generation."
    )
    mutation_prob: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="nsga2: chance that a setting mutates."
    )
    crossover_prob: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="nsga2: chance that two parents are crossed."
    )
    swapping_prob: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="nsga2: chance that a setting comes from the other parent."
    )
    qmc_type: Literal["sobol", "halton"] | None = Field(None, description="qmc: the sequence.")
    scramble: Switch | None = Field(None, description="qmc: scramble the sequence.")

    @property
    def options(self) -> dict[str, Any]:
        # Optuna's 10 are half of a study of 20 trials; tests/benchmarks/search_speed.py compares them.
        own: dict[str, dict[str, Any]] = {"tpe": {"n_startup_trials": 5}}
        return own.get(self.name, {}) | super().options


class PrunerConfig(_Choice):
    """When a trial stops early. Steps are evaluations; options left out are Optuna's defaults."""

    OPTIONS: ClassVar[dict[str, tuple[str, ...]]] = {
        "hyperband": ("min_resource", "max_resource", "reduction_factor"),
        "asha": ("min_resource", "reduction_factor", "min_early_stopping_rate"),
        "median": ("n_startup_trials", "n_warmup_steps", "interval_steps", "n_min_trials"),
        "percentile": ("percentile", "n_startup_trials", "n_warmup_steps", "interval_steps", "n_min_trials"),
        "patient": ("patience", "min_delta"),
        "none": (),
    }
    name: Literal["hyperband", "asha", "median", "percentile", "patient", "none"] = Field(
        "none", description="Optuna's pruner; `none` with several objectives."
    )
    min_resource: Count | None = Field(None, description="hyperband, asha: evaluations of the first rung.")
    max_resource: Count | None = Field(None, description="hyperband: evaluations of a whole trial.")
    reduction_factor: Annotated[int, Field(ge=2)] | None = Field(
        None, description="hyperband, asha: one of so many trials goes on."
    )
    min_early_stopping_rate: Annotated[int, Field(ge=0)] | None = Field(
        None, description="asha: rungs left out at the start."
    )
    percentile: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="percentile: the best so many percent of trials go on. Default 25."
    )
    n_startup_trials: Annotated[int, Field(ge=0)] | None = Field(
        None, description="median, percentile: trials that are never pruned."
    )
    n_warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="median, percentile: evaluations without pruning."
    )
    interval_steps: Count | None = Field(None, description="median, percentile: evaluations between checks.")
    n_min_trials: Count | None = Field(None, description="median, percentile: trials needed to compare with.")
    patience: Annotated[int, Field(ge=0)] | None = Field(
        None, description="patient: evaluations without improvement before the trial stops. Default 2."
    )
    min_delta: Annotated[float, Field(ge=0)] | None = Field(
        None, description="patient: smallest change that counts as improvement."
    )

    @property
    def options(self) -> dict[str, Any]:
        required: dict[str, dict[str, Any]] = {
            "percentile": {"percentile": 25.0},
            "patient": {"patience": 2},
        }
        return required.get(self.name, {}) | super().options
