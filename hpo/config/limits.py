"""Objectives and limits of a study: metrics to optimise, and metrics with a bound (`constraints`).

Each limit is one of Optuna's constraints: the distance of a trial from the limit, as a share of the limit, so
that limits of different units compare. It is 0 or less if the trial meets the limit.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from hpo.config.study_file import CheckedSection, Problem, refuse, show
from hpo.device import EnergyCounter
from hpo.errors import InputError, did_you_mean
from hpo.extensions import has_own_loop
from hpo.tasks.kind import is_error

ENERGY = "train_joules_per_example"
"""Energy of an NVIDIA GPU with a single worker; see `hpo.training.throughput` for the measurement."""
MEASURED_METRICS = (
    "train_examples_per_second",
    "train_tokens_per_second",
    "evaluation_examples_per_second",
    ENERGY,
    "peak_memory_bytes",
)
"""Metrics of a trial's cost."""
FEASIBLE = "feasible"
"""Constraint of trials whose configuration cannot work (`Outcome`), whatever the limits."""


def unknown_metric(metric: str) -> str:
    """Return an error if no study can have this metric, whatever its tasks; empty otherwise."""
    known = ("score", *MEASURED_METRICS)
    if "/" in metric or metric in known or has_own_loop():
        return ""
    return f"unknown metric {show(metric)}; one of a task is `task/name`.{did_you_mean(metric, known)}"


def check_energy(metrics: Iterable[str], counter: EnergyCounter) -> None:
    """Raise InputError if energy is among `metrics`, but this device cannot measure it."""
    if ENERGY in metrics and counter.missing:
        raise InputError(
            f"{ENERGY}: an objective or a limit of energy needs an NVIDIA GPU (Volta or newer) with one "
            f"worker, and the package nvidia-ml-py, but {counter.missing}"
        )


class ObjectiveConfig(CheckedSection):
    """The metric to optimise. A list makes a study with several objectives."""

    metric: str = "score"
    """`score` (mean of the tasks' primary metrics, an `r2` below 0 as 0), `<task>/<metric>` such as
    `criteria/f1_micro`, `train_examples_per_second`, `train_tokens_per_second`,
    `evaluation_examples_per_second`, `train_joules_per_example` (an NVIDIA GPU for each worker), or
    `peak_memory_bytes`."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """`maximize` or `minimize`."""

    def problems(self) -> Iterator[Problem]:
        if error := unknown_metric(self.metric):
            yield Problem(("metric",), error)
        smaller_is_better = self.metric in ("peak_memory_bytes", ENERGY) or is_error(self.metric)
        if smaller_is_better and self.direction == "maximize":
            yield Problem(("direction",), f"must be `minimize` for {show(self.metric)}: smaller is better.")


def as_tuple(value: Any) -> Any:
    return (ObjectiveConfig.model_validate(value),) if isinstance(value, Mapping) else value


class Limit(CheckedSection):
    """Bounds of a metric. The key is the metric, as in `objective.metric`."""

    min: float | None = None
    """Smallest allowed value."""
    max: float | None = None
    """Largest allowed value."""

    def problems(self) -> Iterator[Problem]:
        if self.min is None and self.max is None:
            yield Problem((), "must have `min` or `max`.")
        elif self.min is not None and self.max is not None and self.min > self.max:
            yield Problem(("min",), f"must be <= `max`, but got {self.min:g} and {self.max:g}.")

    def __str__(self) -> str:
        signs = {">=": self.min, "<=": self.max}
        return " and ".join(f"{sign} {bound:.6g}" for sign, bound in signs.items() if bound is not None)

    def violation(self, value: float) -> float:
        """Return how far `value` is outside, as a share of the limit; from -1 to 0 inside."""
        bounds = ((self.min, -1), (self.max, 1))
        outside = (sign * (value - b) / (abs(b) or 1.0) for b, sign in bounds if b is not None)
        return max(-1.0, *outside)


def _check_metrics(limits: dict[str, Limit]) -> dict[str, Limit]:
    refuse(*(Problem((metric,), error) for metric in limits if (error := unknown_metric(metric))))
    return limits


Limits = Annotated[dict[str, Limit], AfterValidator(_check_metrics)]
"""Limits by metric."""


def violations(limits: Mapping[str, Limit], values: Mapping[str, float | None]) -> dict[str, float]:
    """Return Optuna's constraints of a trial, by metric. An unmeasured value (None) meets its limit: 0."""
    known = ((metric, limit, values.get(metric)) for metric, limit in limits.items())
    return {metric: 0.0 if value is None else limit.violation(value) for metric, limit, value in known}


def violation(constraints: Mapping[str, float]) -> float:
    """Return the total distance of a trial with these constraints from its limits; 0: it meets them."""
    return sum(value for value in constraints.values() if value > 0)


def broken_limits(limits: Mapping[str, Limit], values: Mapping[str, float | None]) -> str:
    """Return a sentence for each broken limit."""
    broken = (metric for metric, value in violations(limits, values).items() if value > 0)
    return " ".join(f"{metric} must be {limits[metric]}, but is {values[metric]:.6g}." for metric in broken)
