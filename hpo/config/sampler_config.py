"""The sampler and the pruner of a study, and their options, named like the arguments of Optuna's classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, JsonValue, ValidationError

from hpo.code import Registry, is_class_name
from hpo.config.study_file import CheckedSection, Problem, problems_of
from hpo.errors import did_you_mean
from hpo.extensions import PRUNERS, SAMPLERS, Extension, Pruner, Sampler, options_in, or_own
from hpo.section import Count, Switch, Whole


def _is_other(own: Registry[Extension]) -> Callable[[Any], bool]:
    """Return a test for names of classes and of the study's own code."""
    return lambda name: is_class_name(name) or own.accepts(name)


class _Algorithm(CheckedSection):
    """An algorithm of Optuna, or of other code with any options."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    WHAT: ClassVar[str]
    OWN: ClassVar[Registry[Extension]]
    """Algorithms of the study's own code."""
    CLASSES: ClassVar[dict[str, str]]
    """Optuna's classes by name."""
    OPTIONS: ClassVar[dict[str, dict[str, Any]]]
    """Options by name, with their defaults; None: Optuna's default."""
    name: str

    @property
    def options(self) -> dict[str, Any]:
        options = dict(self.OPTIONS.get(self.name, {}))
        options |= {option: value for option in options if (value := getattr(self, option)) is not None}
        return {option: value for option, value in options.items() if value is not None}

    @property
    def is_optuna_own(self) -> bool:
        return self.name in self.CLASSES

    @property
    def given_options(self) -> dict[str, Any]:
        """Options of an algorithm of other code."""
        given = {key: getattr(self, key) for key in type(self).model_fields if key not in ("name", "seed")}
        return {key: value for key, value in given.items() if value is not None} | (self.model_extra or {})

    def problems(self) -> Iterator[Problem]:
        if not self.is_optuna_own:
            if self.name in self.OWN:
                try:
                    options_in(self.OWN[self.name], self.given_options)
                except ValidationError as error:
                    yield from problems_of(error, self.OWN[self.name].options)
            return
        for key in self.model_extra or ():
            known = [*type(self).model_fields]
            yield Problem((key,), f"there is no such key.{did_you_mean(key, known)}")
        for option in dict.fromkeys(option for options in self.OPTIONS.values() for option in options):
            names = [name for name in self.OPTIONS if option in self.OPTIONS[name]]
            if getattr(self, option) is not None and self.name not in names:
                yield Problem((option,), f"is an option of {', '.join(names)}, but the name is {self.name}.")


class SamplerConfig(_Algorithm):
    """Choice of the next configuration."""

    WHAT = "sampler"
    OWN = SAMPLERS
    CLASSES: ClassVar[dict[str, str]] = {
        "tpe": "TPESampler",
        "gp": "GPSampler",
        "nsga2": "NSGAIISampler",
        "random": "RandomSampler",
        "grid": "GridSampler",
        "qmc": "QMCSampler",
    }
    # Optuna's 10 are half of a study of 20 trials.
    OPTIONS: ClassVar[dict[str, dict[str, Any]]] = {
        "tpe": {"n_startup_trials": 5, "multivariate": None, "constant_liar": None},
        "gp": {"n_startup_trials": None},
        "nsga2": {"population_size": None},
    }

    name: Annotated[Sampler, or_own(_is_other(SAMPLERS))] = "tpe"
    """Optuna's sampler: <https://optuna.readthedocs.io/en/stable/reference/samplers/index.html>; or a class
    such as `optuna.samplers.CmaEsSampler` or `optunahub:samplers/auto_sampler`, with arguments as keys."""
    seed: Whole = Field(42, ge=0, lt=2**31)
    """Seed of the first worker. Worker n adds n."""
    n_startup_trials: Annotated[Whole, Field(ge=0)] | None = None
    """`tpe`, `gp`: random trials before the sampler learns. Default: 5 for `tpe`, Optuna's for `gp`."""
    multivariate: Switch | None = None
    """`tpe`: draw settings jointly."""
    constant_liar: Switch | None = None
    """`tpe`: avoid the configurations of running trials."""
    population_size: Annotated[Whole, Field(ge=2)] | None = None
    """`nsga2`: trials in a generation."""


class PrunerConfig(_Algorithm):
    """Early end of trials. Steps are evaluations."""

    WHAT = "pruner"
    OWN = PRUNERS
    CLASSES: ClassVar[dict[str, str]] = {
        "hyperband": "HyperbandPruner",
        "asha": "SuccessiveHalvingPruner",
        "median": "MedianPruner",
        "percentile": "PercentilePruner",
        "patient": "PatientPruner",
        "promote": "NopPruner",
        "none": "NopPruner",
    }
    OPTIONS: ClassVar[dict[str, dict[str, Any]]] = {
        "hyperband": {"min_resource": None, "reduction_factor": None},
        "asha": {"min_resource": None, "reduction_factor": None},
        "median": {"n_startup_trials": None, "n_warmup_steps": None},
        "percentile": {"n_startup_trials": None, "n_warmup_steps": None, "percentile": 25.0},
        "patient": {"patience": 2},
        "promote": {"starts": 0.04, "keep": 2, "reduction_factor": 3},
    }

    name: Annotated[Pruner, or_own(_is_other(PRUNERS))] = "none"
    """Optuna's pruner (<https://optuna.readthedocs.io/en/stable/reference/pruners.html>) or a class, like
    `sampler`. With several objectives, only `promote` or `none`. With `promote`, trials pause at each rung,
    and the best continue."""
    min_resource: Count | None = None
    """`hyperband`, `asha`: evaluations before the first rung."""
    reduction_factor: Annotated[Whole, Field(ge=2)] | None = None
    """`hyperband`, `asha`, `promote`: one of this many trials continues. Default for `promote`: 3."""
    n_startup_trials: Annotated[Whole, Field(ge=0)] | None = None
    """`median`, `percentile`: complete trials before the first is pruned."""
    n_warmup_steps: Annotated[Whole, Field(ge=0)] | None = None
    """`median`, `percentile`: first evaluations of each trial to ignore."""
    percentile: Annotated[float, Field(ge=0, le=100)] | None = None
    """`percentile`: the best percentage of trials continues. Default: 25."""
    patience: Annotated[Whole, Field(ge=0)] | None = None
    """`patient`: evaluations without an improvement. Default: 2."""
    starts: Annotated[float, Field(gt=0, lt=1)] | None = None
    """`promote`: share of the budget at the first rung. Each next rung is at `reduction_factor` times the
    previous share, up to half of the budget. Default: 0.04, or more if an evaluation takes longer than the
    training before it."""
    keep: Count | None = None
    """`promote`: smallest number of trials to run to the end. `reduction_factor` times as many reach the last
    rung, and so on. Default: 2."""

    def default_of(self, evaluation_cost: float, num_evaluations: int) -> PrunerConfig:
        """Return the default pruner: `promote`, or `none` for short trials.

        A start trains to the first rung and is evaluated. In a short trial the evaluation is a large part of
        the start, and each run repeats the setup. So `promote` must try at least `reduction_factor`
        configurations for the rows of one whole trial.

        Args:
            evaluation_cost: rows of an evaluation relative to the rows of the whole training.
            num_evaluations: evaluations of a whole trial, except at the rungs.
        """
        pruner = self.fitted(evaluation_cost)
        if pruner.name != "promote":
            return pruner
        _, mean = pruner.costs(evaluation_cost, num_evaluations)
        return pruner if mean <= 1 / pruner.options["reduction_factor"] else PrunerConfig(name="none")

    def costs(self, evaluation_cost: float, num_evaluations: int) -> tuple[float, float]:
        """Return the cost of a start of `promote`, and the mean cost of a configuration.

        Costs are shares of a whole trial. The arguments are those of `default_of`.
        """
        whole = 1 + num_evaluations * evaluation_cost
        ends, factor = [*map(float, self.rungs), 1.0], self.options["reduction_factor"]
        # Each run has an evaluation at its end. The other evaluations are spread over the training.
        training = whole - evaluation_cost
        parts = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
        runs = [(part * training + evaluation_cost) / whole for part in parts]
        return runs[0], sum(run / factor**index for index, run in enumerate(runs))

    def fitted(self, evaluation_cost: float) -> PrunerConfig:
        """Move the first rung so that the training before it takes as long as an evaluation.

        Args:
            evaluation_cost: rows of an evaluation relative to the rows of the whole training.
        """
        if self.name != "promote" or self.starts is not None or evaluation_cost <= self.options["starts"]:
            return self
        return self.model_copy(update={"starts": min(0.5, math.ceil(100 * evaluation_cost) / 100)})

    @property
    def rungs(self) -> tuple[Fraction, ...]:
        """Shares of the budget at which trials of `promote` pause; () for other pruners."""
        if self.name != "promote":
            return ()
        rungs = [Fraction(str(self.options["starts"]))]
        while (rung := self.options["reduction_factor"] * rungs[-1]) <= Fraction(1, 2):
            rungs.append(rung)
        return tuple(rungs)
