"""The tables of `hpo verify --parts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from hpo.report.terminal import Part
    from hpo.trial.compat import Compatibility
    from hpo.trial.verify_parts import PartCheck, PartsCheck


def parts_verification(checks: Sequence[PartsCheck], device: str) -> Iterator[Part]:
    """The parts of a model in each low precision, and those that need fp32."""
    yield Text(device, style="bold")
    for check in checks:
        if check.parts:
            yield f"{check.precision} ({check.support.level})", [_row(part) for part in check.parts]
        yield from _findings(check)
    yield Text(
        "Errors: this part alone in the low precision, all others in fp32. Speed and memory: this part in "
        "fp32, against no part in fp32, forward and backward of a micro-batch.",
        style="dim",
    )


def _row(part: PartCheck) -> dict[str, str]:
    check, costs = part.own.check, part.costs
    found = check.measurement
    error = max(found.logits_relative_error.values(), default=None)
    return {
        "part": part.own.part,
        "alone": check.verdict,
        "first not\nfinite": _first_nonfinite(check),
        "logits\nerror": "" if error is None else f"{error:.1e}",
        "gradient\ncosine": "" if found.gradient_cosine is None else f"{found.gradient_cosine:.6f}",
        "speed\nin fp32": "" if costs is None else f"{costs.speed_ratio:.2f}x",
        "least": "" if costs is None else f"{costs.least_speed_ratio:.2f}x",
        "memory\nin fp32": ""
        if costs is None or costs.memory_ratio is None
        else f"{costs.memory_ratio:.2f}x",
    }


def _first_nonfinite(check: Compatibility) -> str:
    return (check.measurement.first_nonfinite or check.measurement.nonfinite or "").split(" (")[0]


def _findings(check: PartsCheck) -> Iterator[str]:
    if found := check.found:
        change = f"{found.before} without, {found.after} with" if found.parts else found.after
        names = ", ".join(found.parts) or "no part"
        yield f"{check.precision}: fp32_parts: auto is {names} ({change}; {found.num_checks} checks)."
        if found.reason:
            yield f"{check.precision}: {found.reason}"
    if check.fastest and check.costs:
        yield (
            f"{check.precision}: fastest with fp32 in {', '.join(check.fastest)}: "
            f"{check.costs.speed_ratio:.2f} times as fast as without, at least "
            f"{check.costs.least_speed_ratio:.2f} in each pair of passes."
        )
    elif check.found and check.costs:
        yield f"{check.precision}: no set of parts in fp32 was faster in every pair of passes."
    if check.note:
        yield f"{check.precision}: {check.note}"
