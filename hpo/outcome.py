"""The ends of a trial and their states in Optuna; the result and the progress of a trial."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """The end of a trial, stored as the user attribute `outcome`."""

    COMPLETE = "complete"
    """Trained and evaluated."""
    PRUNED = "pruned"
    """Stopped by the pruner or a broken limit."""
    NONFINITE = "nonfinite"
    """Loss, gradients or logits stay NaN or infinite."""
    INCOMPATIBLE = "incompatible"
    """The model works in fp32, but not under the precision; or settings exclude each other."""
    INVALID = "invalid"
    """A fault of the model, the data or a metric: fp32 has it too, or fp32 is unknown."""
    UNSUPPORTED = "unsupported"
    """The device cannot run the requested precision."""
    OOM = "oom"
    """Not even one example fits into memory."""
    CRASHED = "crashed"
    """The process died repeatedly at the same step."""
    FAILED = "failed"
    """A bug or the infrastructure; retried."""
    PAUSED = "paused"
    """Waits at a rung; continues if it is among the best."""
    PREEMPTED = "preempted"
    """Stopped on request and checkpointed; resumes as the same trial."""

    @property
    def infeasible(self) -> bool:
        """The trial violates a constraint because it cannot work.

        Samplers avoid such configurations. They ignore `invalid` trials.
        """
        return self in _INFEASIBLE

    @property
    def wasted(self) -> bool:
        """The trial's time gave the search no value."""
        return self.infeasible or self is Outcome.FAILED

    @property
    def optuna_state(self) -> str:
        """Name of the `optuna.trial.TrialState`.

        A deterministic failure is PRUNED: Optuna's samplers ignore FAIL, and would repeat it.
        """
        return _OPTUNA_STATES.get(self, "PRUNED")


_INFEASIBLE = frozenset(
    {
        Outcome.NONFINITE,
        Outcome.INCOMPATIBLE,
        Outcome.INVALID,
        Outcome.UNSUPPORTED,
        Outcome.OOM,
        Outcome.CRASHED,
    }
)
_OPTUNA_STATES = {
    Outcome.COMPLETE: "COMPLETE",
    Outcome.FAILED: "FAIL",
    Outcome.PAUSED: "RUNNING",
    Outcome.PREEMPTED: "RUNNING",
}


def concerns_precision(outcome: str, telemetry: Mapping[str, Any]) -> bool:
    """Return whether the precision may have caused the outcome.

    Settings with a conflict in every precision also end a trial as `incompatible`.
    """
    if outcome != Outcome.INCOMPATIBLE:
        return outcome != Outcome.INVALID
    is_built = telemetry.get("precision", {}).get("effective") is not None
    return not is_built or telemetry.get("compatibility", {}).get("verdict") == Outcome.INCOMPATIBLE


def shows_precision(outcome: str, telemetry: Mapping[str, Any], is_evaluated: bool) -> bool:
    """Return whether an ended trial shows the effect of its precision: it was evaluated, or broke by it."""
    if outcome in (Outcome.COMPLETE, Outcome.PRUNED):
        return is_evaluated
    if outcome == Outcome.NONFINITE:
        return telemetry.get("finite_in_fp32") is True
    return outcome in (Outcome.INCOMPATIBLE, Outcome.UNSUPPORTED) and concerns_precision(outcome, telemetry)


@dataclass(frozen=True)
class TrialResult:
    """The end of a trial, as the study stores it."""

    outcome: Outcome
    reason: str = ""
    values: tuple[float, ...] | None = None
    """The objectives, always finite; None unless the outcome is `complete`."""
    headline: Mapping[str, str | float | int | bool] = field(default_factory=dict)
    """Scalars that become user attributes."""
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    traceback: str | None = None
    constraints: Mapping[str, float] = field(default_factory=dict)
    """Optuna's constraints for the study's limits (`hpo.config.limits.violations`)."""


@dataclass(frozen=True)
class Progress:
    """The progress of a trial in one of its parts. Reading it never waits for the device."""

    step: int = 0
    budget_used: float = 0.0  # from 0 to 1
    train_loss: float | None = None
    """Mean since the last evaluation; on a GPU, as of the last step that waited for it."""
    examples_per_second: float | None = None
    """Rate of training without the warm-up; None before its end. On a GPU as `train_loss`."""
    checkpoint_seconds: float = 0.0
    """Seconds to write the last checkpoint."""
    part: str = "training"
    """`check`, `compile`, `training`, `evaluation` or `saving` (of a checkpoint)."""
    num_steps: int | None = None  # steps of the whole training; None: unknown, as under `max_seconds`
    best: float | None = None  # first objective of the best evaluation so far
    part_done: float = 0.0  # finished share of an evaluation
    num_texts: int = 0  # texts of an evaluation, and their windows; 0: unknown
    num_windows: int = 0
