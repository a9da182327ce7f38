"""How a trial can end, and what each end means to Optuna."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """The end of a trial; its text is the user attribute `outcome`."""

    COMPLETE = "complete"
    """Trained and evaluated."""
    PRUNED = "pruned"
    """The pruner stopped it, or a limit that it broke."""
    NONFINITE = "nonfinite"
    """Loss, gradients or logits stay NaN or infinite."""
    INCOMPATIBLE = "incompatible"
    """The model works in fp32, but not under the precision; or the trial's settings exclude each other."""
    INVALID = "invalid"
    """The model, the data or a metric is at fault: fp32 has the same fault, or nothing is known of fp32."""
    UNSUPPORTED = "unsupported"
    """The device cannot run the requested precision."""
    OOM = "oom"
    """Not even one example fits into memory."""
    CRASHED = "crashed"
    """Its process died again and again at the same place."""
    FAILED = "failed"
    """A bug or the infrastructure; tried again."""
    PAUSED = "paused"
    """Waits at a rung; continues if it is among the best."""
    PREEMPTED = "preempted"
    """Told to stop; checkpointed, and goes on as the same trial."""

    @property
    def infeasible(self) -> bool:
        """Whether the trial violates a constraint because it cannot work.

        Samplers avoid such configurations. They do not see `invalid` trials, which say nothing about others.
        """
        return self in _INFEASIBLE

    @property
    def wasted(self) -> bool:
        """Whether the trial's time gave the search no value."""
        return self.infeasible or self is Outcome.FAILED

    @property
    def optuna_state(self) -> str:
        """The name of the `optuna.trial.TrialState` that a trial with this outcome ends in.

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
    """Whether the precision of a trial with this outcome and record may have caused the outcome.

    Settings that exclude each other in every precision also end a trial as `incompatible`.
    """
    if outcome != Outcome.INCOMPATIBLE:
        return outcome != Outcome.INVALID
    is_built = telemetry.get("precision", {}).get("effective") is not None
    return not is_built or telemetry.get("compatibility", {}).get("verdict") == Outcome.INCOMPATIBLE
