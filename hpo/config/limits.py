"""Limits that a trial must meet, whatever its objective: `constraints` of a study file.

Each limit is one of Optuna's constraints: how far a trial is outside, as a share of the limit, so that those
of different units compare. It is 0 or less where the trial meets the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator

from hpo.config.study_file import CheckedSection, Problem, refuse, show
from hpo.device import EnergyCounter
from hpo.errors import InputError, did_you_mean
from hpo.extensions import has_own_loop

ENERGY = "train_joules_per_example"
"""Energy of an NVIDIA GPU with a single worker; see `hpo.training.energy` for the measurement."""
MEASURED_METRICS = (
    "train_examples_per_second",
    "train_tokens_per_second",
    "evaluation_examples_per_second",
    ENERGY,
    "peak_memory_bytes",
)
"""What an objective or a limit may name of what a trial costs."""


FEASIBLE = "feasible"
"""The constraint that a trial breaks whose configuration cannot work, whatever the limits: `Outcome`."""


def unknown_metric(metric: str) -> str:
    """Why no study can have this metric, as far as that is known without its tasks; empty: it may."""
    known = ("score", *MEASURED_METRICS)
    if "/" in metric or metric in known or has_own_loop():
        return ""
    return f"unknown metric {show(metric)}; one of a task is `task/name`.{did_you_mean(metric, known)}"


def check_energy(metrics: Iterable[str], counter: EnergyCounter) -> None:
    """Raise InputError if an objective or a limit among `metrics` is energy, and nothing counts it here."""
    if ENERGY in metrics and counter.missing:
        raise InputError(
            f"{ENERGY}: an objective or a limit of energy needs an NVIDIA GPU (Volta or newer) that one "
            f"worker has for itself, and the package nvidia-ml-py, but {counter.missing}"
        )


class Limit(CheckedSection):
    """What a metric must reach, or must not exceed. The key is the metric, as `objective.metric` names it."""

    min: float | None = None
    """The least that is allowed."""
    max: float | None = None
    """The most that is allowed."""

    def problems(self) -> Iterator[Problem]:
        if self.min is None and self.max is None:
            yield Problem((), "must have `min` or `max`.")
        elif self.min is not None and self.max is not None and self.min > self.max:
            yield Problem(("min",), f"must be <= `max`, but got {self.min:g} and {self.max:g}.")

    def __str__(self) -> str:
        signs = {">=": self.min, "<=": self.max}
        return " and ".join(f"{sign} {bound:.6g}" for sign, bound in signs.items() if bound is not None)

    def violation(self, value: float) -> float:
        """How far `value` is outside, as a share of the limit; from -1 to 0 where it is inside."""
        bounds = ((self.min, -1), (self.max, 1))
        outside = (sign * (value - b) / (abs(b) or 1.0) for b, sign in bounds if b is not None)
        return max(-1.0, *outside)


def _check_metrics(limits: dict[str, Limit]) -> dict[str, Limit]:
    refuse(*(Problem((metric,), told) for metric in limits if (told := unknown_metric(metric))))
    return limits


Limits = Annotated[dict[str, Limit], AfterValidator(_check_metrics)]
"""By metric."""


def violations(limits: Mapping[str, Limit], values: Mapping[str, float | None]) -> dict[str, float]:
    """Optuna's constraints of a trial, by metric. What was not measured (None) counts as met: 0."""
    known = ((metric, limit, values.get(metric)) for metric, limit in limits.items())
    return {metric: 0.0 if value is None else limit.violation(value) for metric, limit, value in known}


def violation(constraints: Mapping[str, float]) -> float:
    """Of a trial with these of Optuna's constraints, how far it is outside in all; 0: it meets them."""
    return sum(value for value in constraints.values() if value > 0)


def broken_limits(limits: Mapping[str, Limit], values: Mapping[str, float | None]) -> str:
    """A sentence for each limit that is broken; empty where none is."""
    broken = (metric for metric, value in violations(limits, values).items() if value > 0)
    return " ".join(f"{metric} must be {limits[metric]}, but is {values[metric]:.6g}." for metric in broken)
