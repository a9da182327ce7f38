"""Checks and recommendations for described machines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import altered_executor
from torch import nn

from hpo.device import DeviceInfo
from hpo.precision.table import PRECISION_NAMES, Support
from hpo.trial.compat import Compatibility
from hpo.trial.costs import Costs
from hpo.trial.measure import Measurement
from hpo.trial.verify import PrecisionCheck, check_precision, recommendation, verify

H200 = DeviceInfo(type="cuda", name="NVIDIA H200", compute_capability=(9, 0), cuda_bf16=True)
T4 = DeviceInfo(type="cuda", name="Tesla T4", compute_capability=(7, 5), cuda_bf16=False)
AMX = DeviceInfo(type="cpu", name="Xeon", cpu_features=frozenset({"amx_bf16", "avx512_bf16"}))
PLAIN = DeviceInfo(type="cpu", name="EPYC", cpu_features=frozenset({"avx2"}))


def checked(device: DeviceInfo, **found: Any) -> list[PrecisionCheck]:
    """Check a device with a given result for each precision: a speed or a verdict."""

    def check(name: str, support: Support) -> Compatibility:
        assert support.level != "unsupported"
        result = found.get(name.replace("-", "_"), 1.0)
        is_ok = isinstance(result, float)
        speed = result if is_ok else 9.0
        costs, verdict = Costs(1.0, speed, None, speed), "ok" if is_ok else result
        return Compatibility(verdict, () if is_ok else (f"{name}.",), Measurement(name), costs=costs)

    return verify(device, check)


@pytest.mark.parametrize("device", [H200, T4, AMX, PLAIN], ids=lambda device: device.name)
def test_only_supported_precisions_are_measured(device: DeviceInfo) -> None:
    checks = checked(device)
    assert [check.name for check in checks] == list(PRECISION_NAMES)
    for check in checks:
        level = check.support.level
        assert (check.compatibility is None) == (level == "unsupported")
        assert check.usable == (level == "native") == (check.note == ""), "a note explains why it is not"


SEARCH = "Search fp_precision over"
SPEEDS = {"tf32": 1.5, "bf16": 2.4, "fp16": 2.2, "bf16_true": 1.02}  # the last is as fast as fp32
MIXED = {"fp16": "incompatible", "bf16": "degraded", "tf32": 0.9, "bf16_true": 0.9, "fp8": 0.9}


@pytest.mark.parametrize(
    ("device", "found", "advice"),
    [
        (H200, SPEEDS, f"{SEARCH} [fp32, tf32, bf16, fp16]: bf16 is the fastest, 2.4 times as fast"),
        (H200, MIXED, f"{SEARCH} [fp32, bf16]: bf16 is the fastest"),
        # Weights in the range of bf16 alone, say.
        (AMX, {"fp32": "incompatible", "bf16": 2.0}, f"{SEARCH} [bf16]: bf16 is the fastest"),
        (AMX, dict.fromkeys(("fp32", "bf16", "bf16_true"), "invalid"), "Correct the model or the data"),
        (PLAIN, {"bf16": 3.0}, "Use fp32: no native precision of this machine is faster on this model."),
        (PLAIN, {"fp32": "incompatible"}, "No precision works natively with this model here"),
    ],
)
def test_recommendation(device: DeviceInfo, found: dict[str, Any], advice: str) -> None:
    assert recommendation(checked(device, **found)).startswith(advice)


@pytest.mark.parametrize("compile_mode", ["none", "default"])
def test_speed_ratio_of_compiled_models(compile_mode: str, tmp_path: Path, monkeypatch: Any) -> None:
    """On a clock of its own, a compiled pass takes one second and another pass four, in each precision."""
    now = [0.0]
    monkeypatch.setattr("hpo.trial.measure.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def spend(module: nn.Module, *_: Any) -> None:
        now[0] += 1.0 if hasattr(module, "planted_compiler") else 4.0

    training = {"max_steps": 1, "max_length": 64, "compile": compile_mode}
    plant = lambda model: model.register_forward_pre_hook(spend)  # noqa: E731
    executor = altered_executor(tmp_path, plant, training=training)
    compiled = lambda model, *_: setattr(model, "planted_compiler", True)  # noqa: E731
    executor.loader.apply_compile = compiled
    for name in ("bf16", "bf16-true"):
        found = check_precision(executor, name, repeats=1).costs
        assert found == Costs(4.0 if compile_mode == "none" else 1.0, 1.0, found.memory_ratio, 1.0)
