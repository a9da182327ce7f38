"""How each precision does on this machine, before a search: `hpo verify`.

Every precision that runs here, natively or emulated, is measured on the study's own model and data. Nothing
is trained and nothing stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpo.config.trial_config import build_trial_config
from hpo.config.trial_settings import OVERRIDE
from hpo.device import DeviceInfo
from hpo.errors import EnvironmentOverrideError, ModelError, OutOfMemory, TrialEnd
from hpo.models.model_parts import parts_of, set_float32_parts
from hpo.precision.environment import refuse_overrides
from hpo.precision.known_breaks import known_breaks
from hpo.precision.table import PRECISION_NAMES, Resolution, Support, support
from hpo.trial.compat import Compatibility, judge, measure_parts
from hpo.trial.executor import Executor
from hpo.trial.smallest_parts import smallest_parts
from hpo.trial.trial_run import check_overrides


@dataclass(frozen=True)
class PrecisionCheck:
    """One precision on this machine."""

    name: str
    support: Support
    compatibility: Compatibility | None
    """None where it was not measured; `note` says why."""
    note: str = ""
    float32_parts: tuple[str, ...] | None = None
    """The fewest parts in fp32 that make it `ok`; () where none do, None where they were not looked for."""
    with_parts: Compatibility | None = None
    """What was measured with them."""

    @property
    def speed_ratio(self) -> float | None:
        """fp32's seconds over this precision's."""
        return self.compatibility.measurement.speed_ratio if self.compatibility else None

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than fp32 by more than 5 % and in every pass that was timed."""
        return _is_faster(self.compatibility)

    @property
    def usable(self) -> bool:
        """Native, and not incompatible."""
        works = self.compatibility is not None and self.compatibility.verdict != "incompatible"
        return works and self.support.level == "native"


def _is_faster(found: Compatibility | None) -> bool:
    if found is None or found.measurement.speed_ratio is None:
        return False
    low = found.measurement.speed_ratio_low
    return found.measurement.speed_ratio > 1.05 and (low is None or low > 1)


def check_precision(
    executor: Executor, name: str, repeats: int, on_estimate: Callable[[float], None] = lambda _: None
) -> Compatibility:
    """The compatibility check alone, with the study's fixed settings, emulated or not; not cached.

    `on_estimate` is told the seconds that the `repeats` timed passes will take.
    """
    refuse_overrides([name], executor.amp, executor.device.type, float32_for=["hpo verify"])
    config = build_trial_config(executor.study, {}, name, executor.amp)
    resolution = Resolution(name, name, support(name, executor.device).level)
    check_overrides(config, resolution)
    parts = executor.parts(config, resolution)
    found = judge(measure_parts(parts, executor.device, repeats, on_estimate), executor.study.compat)
    model_type = getattr(parts.model.encoder.config, "model_type", "")
    return replace(found, known=tuple(known_breaks(model_type, name, config.attention)))


def verify(device: DeviceInfo, check: Callable[[str, Support], Compatibility]) -> list[PrecisionCheck]:
    """`check` each precision that `device` runs, natively or emulated; `check_precision` is such a check."""
    checks = []
    for name in PRECISION_NAMES:
        found = support(name, device)
        compatibility, note = None, found.reason
        if found.level != "unsupported":
            try:
                compatibility = check(name, found)
                note = " ".join((*compatibility.reasons, *compatibility.known)) or note
            except (EnvironmentOverrideError, TrialEnd) as error:
                note = str(error)
        checks.append(PrecisionCheck(name, found, compatibility, note))
    return checks


def propose_parts(
    executor: Executor,
    checks: Sequence[PrecisionCheck],
    repeats: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[PrecisionCheck]:
    """Find for each precision that was checked and is not `ok` the parts that have to be in fp32.

    They come to those of the study. What is found is timed as the precision alone was, by `repeats` passes.
    `say` is told how many sets are to be checked, and each of them.
    """
    return [
        _with_parts(executor, check, repeats, say)
        if check.compatibility and check.compatibility.verdict != "ok" and check.name != "fp32"
        else check
        for check in checks
    ]


def _with_parts(
    executor: Executor, check: PrecisionCheck, repeats: int, say: Callable[[str], None]
) -> PrecisionCheck:
    config = build_trial_config(executor.study, {}, check.name, executor.amp)
    parts = executor.parts(config, Resolution(check.name, check.name, check.support.level))
    asked: dict[tuple[str, ...], bool] = {}

    def put_in_float32(*chosen: str) -> None:
        set_float32_parts(parts.model, parts.loss_fn, (*config.float32_parts, *chosen))

    def measured(chosen: tuple[str, ...], num_passes: int) -> Compatibility:
        put_in_float32(*chosen)
        return judge(measure_parts(parts, executor.device, num_passes), executor.study.compat)

    def is_ok(chosen: tuple[str, ...]) -> bool:
        if chosen not in asked:
            say(f"checking {check.name} with {', '.join(chosen)} in fp32 (check {len(asked) + 1})")
            try:
                asked[chosen] = measured(chosen, 0).verdict == "ok"
            except OutOfMemory:  # fp32 takes more
                asked[chosen] = False
        return asked[chosen]

    impossible: dict[str, ModelError] = {}
    known = parts_of(parts.model)
    for part in known:
        try:
            put_in_float32(part)
        except ModelError as error:
            impossible[part] = error
    say(
        f"looking for the parts that {check.name} needs in fp32: one check of all together, then of each "
        f"alone ({len(known) - len(impossible)}), then of sets of them, until one suffices"
    )
    found = smallest_parts(parts.model, is_ok, impossible.keys())
    timed = measured(found, repeats) if found else None
    notes = [check.note, _not_tried(impossible), _proposal(found, timed)]
    note = " ".join(filter(None, notes))
    return replace(check, note=note, float32_parts=found or (), with_parts=timed)


def _not_tried(impossible: Mapping[str, ModelError]) -> str:
    if not impossible:
        return ""
    return f"Not tried in fp32: {', '.join(impossible)} ({next(iter(impossible.values()))})"


def _proposal(found: Sequence[str] | None, timed: Compatibility | None) -> str:
    """What to write into the study file, in its own syntax."""
    if not found:
        return "No set of parts in fp32 makes it ok."
    ratio = timed.measurement.speed_ratio if timed else None
    speed = "" if ratio is None else f", at {ratio:.2f} times the speed of fp32"
    lines = "\n".join(f"  {OVERRIDE}{part}: fp32" for part in found)
    return f"It is ok{speed}, with these lines under `training:`\n{lines}"


def recommendation(checks: Sequence[PrecisionCheck]) -> str:
    """Which precisions are worth searching here, and why the others are not."""
    usable = [check for check in checks if check.usable]
    faster = [check for check in usable if check.name != "fp32" and check.is_faster]
    proposed = [check for check in checks if check.with_parts and check.support.level == "native"]
    emulated = [check.name for check in checks if check.support.level == "emulated"]
    if faster:
        fastest = max(faster, key=lambda check: check.speed_ratio or 0)
        names = ", ".join(check.name for check in usable if check.name == "fp32" or check in faster)
        advice = (
            f"Search fp_precision over [{names}]: {fastest.name} is the fastest, "
            f"{fastest.speed_ratio:.1f} times as fast as fp32 on the check's batch."
        )
    elif quick := [check for check in proposed if _is_faster(check.with_parts)]:
        names = ", ".join(check.name for check in quick)
        advice = (
            f"Use {names} with the parts in fp32 of its lines above: faster than fp32 on the check's batch."
        )
    elif any(check.name == "fp32" for check in usable):
        advice = "Use fp32: no native precision of this machine is faster on this model."
    else:
        advice = "No precision works natively with this model here; see the reasons above."
    if slow := [check.name for check in proposed if not _is_faster(check.with_parts)]:
        advice += f" With parts in fp32 {', '.join(slow)} would be ok, but not faster than fp32."
    if emulated:
        advice += f" Leave out {', '.join(emulated)}: emulated here, without instructions of their own."
    return advice
