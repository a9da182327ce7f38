"""What this machine does with each precision, for a person who is about to search: `hpo verify`.

Every precision is measured on the study's own model and data, also those that the device only emulates:
that they are slow is what a person wants to see. Nothing is trained and nothing stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpo.errors import OutOfMemory
from hpo.precision.table import PRECISION_NAMES, Support, support
from hpo.trial.compat import Compatibility
from hpo.trial.executor import Executor


@dataclass(frozen=True)
class PrecisionCheck:
    """One precision on this machine."""

    name: str
    support: Support
    compatibility: Compatibility | None
    """None where the device cannot run it at all, or one example does not fit."""
    note: str = ""

    @property
    def speed_ratio(self) -> float | None:
        """fp32's seconds over this precision's."""
        return self.compatibility.measurement.speed_ratio if self.compatibility else None

    @property
    def usable(self) -> bool:
        """Native, and not incompatible."""
        return (
            self.support.level == "native"
            and self.compatibility is not None
            and self.compatibility.verdict != "incompatible"
        )


def verify(
    executor: Executor,
    names: Sequence[str] = PRECISION_NAMES,
    repeats: int = 3,
    on_start: Callable[[str], None] = lambda _: None,
) -> list[PrecisionCheck]:
    """Check each precision of `names`, timing the fastest of `repeats` passes."""
    checks = []
    for name in names:
        found = support(name, executor.device)
        if found.level == "unsupported":
            checks.append(PrecisionCheck(name, found, None, found.reason))
            continue
        on_start(name)
        try:
            compatibility = executor.check_precision(name, repeats)
        except OutOfMemory as error:
            checks.append(PrecisionCheck(name, found, None, str(error)))
            continue
        checks.append(
            PrecisionCheck(name, found, compatibility, " ".join(compatibility.reasons) or found.reason)
        )
    return checks


def recommendation(checks: Sequence[PrecisionCheck]) -> str:
    """Which precisions are worth searching here, and why the others are not."""
    usable = [check for check in checks if check.usable]
    faster = [check for check in usable if check.name != "fp32" and (check.speed_ratio or 0) > 1.05]
    emulated = [check.name for check in checks if check.support.level == "emulated"]
    sentences = []
    if faster:
        fastest = max(faster, key=lambda check: check.speed_ratio or 0)
        names = ", ".join(check.name for check in usable if check.name == "fp32" or check in faster)
        sentences.append(
            f"Search fp_precision over [{names}]: {fastest.name} is the fastest, "
            f"{fastest.speed_ratio:.1f} times as fast as fp32 on the check's batch."
        )
    elif any(check.name == "fp32" for check in usable):
        sentences.append("Use fp32: no native precision of this machine is faster on this model.")
    else:
        sentences.append("No precision works natively with this model here; see the reasons above.")
    if emulated:
        sentences.append(
            f"Leave out {', '.join(emulated)}: emulated here, without instructions of their own."
        )
    return " ".join(sentences)
