"""Which precisions a machine is told to search; machines are described, not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_executor

from hpo.device import DeviceInfo
from hpo.errors import OutOfMemory
from hpo.precision.table import PRECISION_NAMES
from hpo.trial.compat import Compatibility, Measurement
from hpo.trial.verify import PrecisionCheck, check_precision, recommendation, verify

H200 = DeviceInfo(type="cuda", name="NVIDIA H200", compute_capability=(9, 0), cuda_bf16=True)
T4 = DeviceInfo(type="cuda", name="Tesla T4", compute_capability=(7, 5), cuda_bf16=False)
AMX = DeviceInfo(type="cpu", name="Xeon", cpu_features=frozenset({"amx_bf16", "avx512_bf16"}))
PLAIN = DeviceInfo(type="cpu", name="EPYC", cpu_features=frozenset({"avx2"}))


def checked(device: DeviceInfo, **found: Any) -> list[PrecisionCheck]:
    """Check a device on which the check of each precision finds `found`: a speed, a verdict or an error."""

    def check(name: str, repeats: int, _on_estimate: Any) -> Compatibility:
        assert repeats == 3
        came = found.get(name.replace("-", "_"), 1.0)
        if isinstance(came, Exception):
            raise came
        if isinstance(came, str):
            return Compatibility(came, (f"{name} is {came}.",), Measurement(name, speed_ratio=9.0))
        return Compatibility("ok", (), Measurement(name, speed_ratio=came))

    return verify(device, check)


@pytest.mark.parametrize(
    ("device", "native", "emulated"),
    [
        (T4, {"fp32", "fp16"}, {"bf16", "bf16-true"}),
        (AMX, {"fp32", "bf16", "bf16-true"}, {"fp16"}),
        (PLAIN, {"fp32"}, {"bf16", "fp16", "bf16-true"}),
    ],
)
def test_what_the_device_cannot_run_is_not_measured(
    device: DeviceInfo, native: set[str], emulated: set[str]
) -> None:
    started = []

    def check(name: str, _repeats: int, on_estimate: Any) -> Compatibility:
        on_estimate(7.0)
        return Compatibility("ok", (), Measurement(name))

    estimates: list[tuple[str, float]] = []
    checks = verify(
        device,
        check,
        on_start=lambda name, found: started.append((name, found.level)),
        on_estimate=lambda *told: estimates.append(told),
    )
    assert [check.name for check in checks] == list(PRECISION_NAMES)
    for of_level, names in (("native", native), ("emulated", emulated)):
        assert {check.name for check in checks if check.support.level == of_level} == names
        assert {name for name, level in started if level == of_level} == names
    assert estimates == [(name, 7.0) for name, _ in started]
    assert {check.name for check in checks if check.usable} == native
    for check in checks:
        assert (check.note == "") == (check.name in native), "what is not native says why"
        if check.support.level == "unsupported":
            assert check.compatibility is None
            assert f"`{check.name}` needs" in check.note


def test_the_fastest_native_precision_is_recommended() -> None:
    advice = recommendation(checked(H200, tf32=1.5, bf16=2.4, fp16=2.2, bf16_true=1.02))
    assert advice.startswith("Search fp_precision over [fp32, tf32, bf16, fp16")
    assert "bf16-true" not in advice, "as fast as fp32"
    assert "bf16 is the fastest, 2.4 times as fast as fp32" in advice


def test_what_was_not_faster_in_every_pass_is_not_called_faster() -> None:
    noisy = Measurement("bf16", speed_ratio=1.65, speed_ratio_low=0.8, speed_ratio_high=2.1)
    checks = verify(AMX, lambda name, *_: Compatibility("ok", (), replace(noisy, precision=name)))
    assert recommendation(checks).startswith("Use fp32: no native precision of this machine is faster")


def test_what_is_incompatible_is_not_recommended() -> None:
    checks = checked(H200, fp16="incompatible", bf16="degraded", tf32=0.9, bf16_true=0.9, fp8=0.9)
    fp16 = next(check for check in checks if check.name == "fp16")
    assert (fp16.usable, fp16.note) == (False, "fp16 is incompatible.")
    assert "over [fp32, bf16]: bf16 is the fastest" in recommendation(checks)


def test_fp32_alone() -> None:
    advice = recommendation(checked(PLAIN, bf16=3.0))
    assert advice == (
        "Use fp32: no native precision of this machine is faster on this model. "
        "Leave out bf16, fp16, bf16-true: emulated here, without instructions of their own."
    )


def test_fp32_that_does_not_work_is_not_recommended() -> None:
    """Weights that only bf16's range holds, say."""
    assert "over [bf16]: bf16 is the fastest" in recommendation(checked(AMX, fp32="incompatible", bf16=2.0))
    advice = recommendation(checked(PLAIN, fp32="incompatible"))
    assert "No precision works natively with this model here" in advice


def test_memory_that_does_not_suffice_is_noted() -> None:
    checks = checked(T4, fp32=OutOfMemory("one example of 512 tokens does not fit into memory."))
    assert checks[0].note == "one example of 512 tokens does not fit into memory."
    assert not checks[0].usable
    assert checks[0].speed_ratio is None


def test_each_precision_is_timed_in_turn_with_fp32(tmp_path: Path) -> None:
    executor = tiny_executor(tmp_path, training={"max_steps": 1, "max_length": 32})
    estimates: list[float] = []
    found = check_precision(executor, "fp32", 3, estimates.append).measurement
    assert 0 < found.speed_ratio_low <= found.speed_ratio <= found.speed_ratio_high
    (seconds,) = estimates
    assert seconds > 0
