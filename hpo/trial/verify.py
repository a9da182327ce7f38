"""Check of each precision on this machine before a search: `hpo verify`.

Every supported or emulated precision is measured on the study's model and data: its errors on the batch of a
trial's check, its speed and memory on a micro-batch of training. Nothing is trained or stored.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpo.config.trial_settings import AUTO
from hpo.device import DeviceInfo
from hpo.errors import TrialEnd
from hpo.precision.table import PRECISION, PRECISION_NAMES, Support, support
from hpo.trial.compat import Compatibility, judge, measure_parts
from hpo.trial.costs import costs_of_trial
from hpo.trial.executor import Executor
from hpo.trial.part_search import find_parts
from hpo.trial.parts import build_trial

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrecisionCheck:
    """One precision on this machine."""

    name: str
    support: Support
    compatibility: Compatibility | None
    """None: it was not measured, for the reason in `note`."""
    note: str = ""

    @property
    def usable(self) -> bool:
        """Native, and neither incompatible nor invalid."""
        verdict = self.compatibility.verdict if self.compatibility else "invalid"
        return verdict not in ("incompatible", "invalid") and self.support.level == "native"

    @property
    def speed_ratio(self) -> float | None:
        """fp32's seconds over this precision's. None: not measured."""
        costs = self.compatibility and self.compatibility.costs
        return costs.speed_ratio if costs else None

    @property
    def is_faster(self) -> bool:
        """True if it was faster than fp32 in every pair of passes, and by more than 5 % in the median."""
        costs = self.compatibility.costs if self.compatibility else None
        return costs is not None and costs.speed_ratio > 1.05 and costs.least_speed_ratio > 1


def check_precision(executor: Executor, name: str, repeats: int) -> Compatibility:
    """Check the study's fixed settings in a precision, emulated or not, and measure its costs.

    Nothing is cached. The costs are those of a micro-batch; the errors are those of the trial's check.
    """
    slow = " (emulated here, so slow)" if support(name, executor.device).level == "emulated" else ""
    passes = "" if name == "fp32" else f", and timing {repeats} training passes against fp32"
    _logger.info("checking %s%s%s ...", name, passes, slow)
    emulating = executor.resolved.with_amp(allow_emulated=True)
    parts = build_trial(emulating, {PRECISION: name}, executor.loader)
    if parts.config.fp32_parts == AUTO:
        parts = parts.with_float32_parts(find_parts(parts, None).parts)
    check = judge(measure_parts(parts), executor.study.compat)
    measured = check.measurement
    runs = name != "fp32" and measured.finite and measured.reference_fits
    return replace(check, costs=costs_of_trial(parts, repeats)) if runs else check


def verify(device: DeviceInfo, check: Callable[[str, Support], Compatibility]) -> list[PrecisionCheck]:
    """Call `check` (`check_precision`) for each supported or emulated precision of `device`."""
    checks = []
    for name in PRECISION_NAMES:
        supported = support(name, device)
        compatibility, note = None, supported.reason
        if supported.level != "unsupported":
            try:
                compatibility = check(name, supported)
                note = " ".join(compatibility.reasons) or note
            except TrialEnd as error:
                note = str(error)
        checks.append(PrecisionCheck(name, supported, compatibility, note))
    return checks


def recommendation(checks: Sequence[PrecisionCheck]) -> str:
    """Recommend precisions for a search on this machine, with reasons."""
    usable = [check for check in checks if check.usable]
    faster = [check for check in usable if check.name != "fp32" and check.is_faster]
    emulated = [check.name for check in checks if check.support.level == "emulated"]
    if faster:
        fastest = max(faster, key=lambda check: check.speed_ratio or 0)
        names = ", ".join(check.name for check in usable if check.name == "fp32" or check in faster)
        advice = (
            f"Search fp_precision over [{names}]: {fastest.name} is the fastest, "
            f"{fastest.speed_ratio:.1f} times as fast as fp32 on a micro-batch."
        )
    elif any(check.name == "fp32" for check in usable):
        advice = "Use fp32: no native precision of this machine is faster on this model."
    elif any(check.compatibility and check.compatibility.verdict == "invalid" for check in checks):
        return "Correct the model or the data: fp32 does not work either, so no precision is to blame."
    else:
        advice = "No precision works natively with this model here; see the reasons above."
    if emulated:
        advice += f" Leave out {', '.join(emulated)}: emulated here, without native instructions."
    return advice
