"""Which of Optuna's samplers and pruners a study uses, and their options.

An option is an argument of Optuna's class, by the same name.
"""

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
    """Whether a name is that of a class, or one that the study's code brings."""
    return lambda name: is_class_name(name) or own.accepts(name)


class _Algorithm(CheckedSection):
    """A named algorithm of Optuna's, and the options of those that have any.

    An algorithm of other code takes any options: those of its class, or of the study's own code.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    WHAT: ClassVar[str]
    OWN: ClassVar[Registry[Extension]]
    """Those that the code in use brings."""
    CLASSES: ClassVar[dict[str, str]]
    """Optuna's class of each name."""
    OPTIONS: ClassVar[dict[str, dict[str, Any]]]
    """The options of each name that has any, with their defaults; None: Optuna's."""
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
        """The options of an algorithm of other code."""
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
    """Which configuration is tried next."""

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
    such as `optuna.samplers.CmaEsSampler` or `optunahub:samplers/auto_sampler`, with its arguments beside."""
    seed: Whole = Field(42, ge=0, lt=2**31)
    """Seed; worker number n adds n."""
    n_startup_trials: Annotated[Whole, Field(ge=0)] | None = None
    """`tpe`, `gp`: random trials before the sampler learns; left out, 5 for `tpe` and Optuna's for `gp`."""
    multivariate: Switch | None = None
    """`tpe`: settings are drawn together."""
    constant_liar: Switch | None = None
    """`tpe`: keeps away from what other workers are trying."""
    population_size: Annotated[Whole, Field(ge=2)] | None = None
    """`nsga2`: trials of a generation."""


class PrunerConfig(_Algorithm):
    """When a trial stops early. Steps are evaluations."""

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
    """Optuna's pruner (<https://optuna.readthedocs.io/en/stable/reference/pruners.html>) or a class, as for
    `sampler`; `promote` or `none` with several objectives. With `promote` trials pause at each rung, and the
    best go on."""
    min_resource: Count | None = None
    """`hyperband`, `asha`: evaluations before the first rung."""
    reduction_factor: Annotated[Whole, Field(ge=2)] | None = None
    """`hyperband`, `asha`, `promote`: of so many trials one goes on; left out, 3 for `promote`."""
    n_startup_trials: Annotated[Whole, Field(ge=0)] | None = None
    """`median`, `percentile`: trials before the first is stopped."""
    n_warmup_steps: Annotated[Whole, Field(ge=0)] | None = None
    """`median`, `percentile`: evaluations after which none of a trial's counts."""
    percentile: Annotated[float, Field(ge=0, le=100)] | None = None
    """`percentile`: trials go on that are among so many percent; left out, 25."""
    patience: Annotated[Whole, Field(ge=0)] | None = None
    """`patient`: evaluations without getting better; left out, 2."""
    starts: Annotated[float, Field(gt=0, lt=1)] | None = None
    """`promote`: share of a budget at which the first rung is; each of the others is at `reduction_factor`
    times the one before, as long as half of the budget is left. Left out, 0.04, or later where training to
    there takes less than the evaluation."""
    keep: Count | None = None
    """`promote`: at least so many trials go on to the end, and `reduction_factor` times as many to the last
    rung, and so on; left out, 2."""

    def default_of(self, evaluation_cost: float, num_evaluations: int) -> PrunerConfig:
        """Return the pruner of a study whose file names none: `promote`, or `none` for short trials.

        A start trains to the first rung and is evaluated there. If trials are short, the evaluation is a
        large part of the start. Then `promote` tries few configurations in the time of one whole trial, and
        several must start before one comes to its end. Each run also repeats the setup, whose time depends on
        the machine and is not counted. So `promote` must try at least `reduction_factor` configurations for
        the rows of one whole trial.

        Args:
            evaluation_cost: rows of an evaluation relative to the rows of the whole training.
            num_evaluations: of a whole trial, without those at the rungs.
        """
        pruner = self.fitted(evaluation_cost)
        if pruner.name != "promote":
            return pruner
        _, mean = pruner.costs(evaluation_cost, num_evaluations)
        return pruner if mean <= 1 / pruner.options["reduction_factor"] else PrunerConfig(name="none")

    def costs(self, evaluation_cost: float, num_evaluations: int) -> tuple[float, float]:
        """Return what a start of `promote` costs, and a configuration on average, as shares of a whole trial.

        The arguments are those of `default_of`.
        """
        whole = 1 + num_evaluations * evaluation_cost
        ends, factor = [*map(float, self.rungs), 1.0], self.options["reduction_factor"]
        # Each run has an evaluation at its end. The other evaluations are spread over the training.
        training = whole - evaluation_cost
        parts = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
        runs = [(part * training + evaluation_cost) / whole for part in parts]
        return runs[0], sum(run / factor**index for index, run in enumerate(runs))

    def fitted(self, evaluation_cost: float) -> PrunerConfig:
        """With a first rung to which a trial trains for at least as long as an evaluation takes.

        Args:
            evaluation_cost: what one evaluation costs of what it takes to train the whole trial.
        """
        if self.name != "promote" or self.starts is not None or evaluation_cost <= self.options["starts"]:
            return self
        return self.model_copy(update={"starts": min(0.5, math.ceil(100 * evaluation_cost) / 100)})

    @property
    def rungs(self) -> tuple[Fraction, ...]:
        """The shares of a budget at which trials of `promote` pause; of other pruners none."""
        if self.name != "promote":
            return ()
        rungs = [Fraction(str(self.options["starts"]))]
        while (rung := self.options["reduction_factor"] * rungs[-1]) <= Fraction(1, 2):
            rungs.append(rung)
        return tuple(rungs)
