"""Precision as a value: names, what devices support, and what a trial gets."""

from __future__ import annotations

from typing import Literal

import pytest

from hpo.device import DeviceInfo
from hpo.errors import Unsupported
from hpo.precision.table import (
    ALIASES,
    PRECISION_NAMES,
    PRESETS,
    AmpConfig,
    apply_preset,
    canonical_precision,
    left_out,
    resolve,
    support,
)


def cpu(*features: str) -> DeviceInfo:
    return DeviceInfo(type="cpu", name="Test CPU", cpu_features=frozenset(features))


def gpu(major: int, minor: int, *, bf16: bool | None = None) -> DeviceInfo:
    return DeviceInfo(type="cuda", name="Test GPU", compute_capability=(major, minor), cuda_bf16=bf16)


P100, T4, A100, ADA, H200 = gpu(6, 0), gpu(7, 5), gpu(8, 0), gpu(8, 9), gpu(9, 0)
OLD_CPU, AMX = cpu("avx2"), cpu("avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_bf16")


def test_the_other_spellings() -> None:
    assert ALIASES == {"none": "fp32", "32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
    for name in PRECISION_NAMES:
        assert canonical_precision(name) == name
    assert canonical_precision("16-mixed") == "fp16"


DEVICES = {
    "old CPU": OLD_CPU,
    "AMX": AMX,
    "P100": P100,
    "T4": T4,
    "A100": A100,
    "Ada": ADA,
    "H200": H200,
}
LEVELS = {  # n: native, e: emulated, u: unsupported; in the order of DEVICES
    "fp32": "nnnnnnn",
    "tf32": "uuuunnn",
    "bf16": "eneennn",
    "bf16-true": "eneennn",
    "fp16": "enennnn",
    "fp8": "uuuuunn",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PRECISION_NAMES)
def test_support_is_what_the_table_of_the_design_says(name: str, device: str) -> None:
    found = support(name, DEVICES[device])
    assert found.level[0] == dict(zip(DEVICES, LEVELS[name], strict=True))[device]
    assert bool(found.reason) == (found.level != "native")


def test_the_probe_of_native_bf16_wins_over_the_compute_capability() -> None:
    assert support("bf16", gpu(9, 0, bf16=False)).level == "emulated"
    assert support("bf16", gpu(7, 5, bf16=True)).level == "native"


@pytest.mark.parametrize("mode", ["skip", "prune"])
def test_a_reason_names_need_device_and_way_out(mode: Literal["skip", "prune"]) -> None:
    with pytest.raises(Unsupported) as raised:
        resolve("bf16", T4, AmpConfig(on_unsupported=mode))
    assert str(raised.value) == (
        "`bf16` needs compute capability >= 8.0, but this Test GPU has 7.5. "
        "Use fp16, or set amp.allow_emulated: true to run it emulated."
    )


def test_what_a_device_leaves_out() -> None:
    found = left_out(["fp32", "bf16", "fp16", "fp8"], T4, AmpConfig())
    assert list(found) == ["bf16", "fp8"]
    assert found["bf16"] == "`bf16` needs compute capability >= 8.0, but this Test GPU has 7.5."
    assert list(left_out(PRECISION_NAMES, T4, AmpConfig(allow_emulated=True))) == ["tf32", "fp8"]
    assert AmpConfig().on_unsupported == "skip"


def test_emulation_is_allowed_only_when_the_study_says_so() -> None:
    resolution = resolve("bf16", OLD_CPU, AmpConfig(allow_emulated=True))
    assert (resolution.effective, resolution.support) == ("bf16", "emulated")
    assert "AMX or AVX512-BF16" in resolution.reason


@pytest.mark.parametrize(
    ("features", "native"),
    [
        ({"avx2", "avx512"}, {"fp32"}),
        ({"avx512", "avx512_bf16"}, {"fp32", "bf16", "bf16-true"}),
        ({"avx512", "avx512_fp16"}, {"fp32", "fp16"}),
        ({"amx_bf16", "amx_fp16"}, {"fp32", "bf16", "bf16-true", "fp16"}),
        ({"arm_bf16"}, {"fp32", "bf16", "bf16-true"}),
        ({"arm_fp16"}, {"fp32", "fp16"}),
    ],
    ids=lambda names: "-".join(sorted(names)),
)
def test_native_precisions_of_a_cpu(features: set[str], native: set[str]) -> None:
    levels = {name: support(name, cpu(*features)).level for name in PRECISION_NAMES}
    assert {name for name, level in levels.items() if level == "native"} == native


@pytest.mark.parametrize(
    ("requested", "device", "effective"),
    [("bf16", T4, "fp16"), ("bf16", OLD_CPU, "fp32"), ("fp8", A100, "bf16"), ("tf32", T4, "fp32")],
)
def test_fallback_is_the_next_that_works_and_says_so(
    requested: str, device: DeviceInfo, effective: str
) -> None:
    resolution = resolve(requested, device, AmpConfig(on_unsupported="fallback"))
    assert (resolution.requested, resolution.effective) == (requested, effective)
    assert f"Ran {effective} instead" in resolution.reason
    assert resolve(effective, device, AmpConfig(on_unsupported="fallback")).reason == ""


@pytest.mark.parametrize(
    ("device", "name"), [(H200, "bf16"), (T4, "fp16"), (P100, "fp32"), (OLD_CPU, "fp32"), (AMX, "bf16")]
)
def test_auto_is_the_best_native_precision(device: DeviceInfo, name: str) -> None:
    assert apply_preset(AmpConfig(), device)[1] == name


@pytest.mark.parametrize(
    ("preset", "precision", "tf32", "fallback"),
    [("basic", "fp32", False, False), ("advanced", "fp16", True, False), ("ultra", "bf16", True, True)],
)
def test_presets(preset: str, precision: str, tf32: bool, fallback: bool) -> None:
    config, name = apply_preset(AmpConfig.model_validate({"preset": preset}), OLD_CPU)
    assert (name, config.tf32, config.fallback_to_fp32) == (precision, tf32, fallback)
    assert config.cudnn_benchmark == config.track_stats == (preset != "basic")
    assert config.max_fp32_fallbacks == 3


@pytest.mark.parametrize("preset", PRESETS)
def test_a_key_that_is_given_wins_over_the_preset(preset: str) -> None:
    given = AmpConfig.model_validate({"preset": preset, "tf32": True, "track_stats": False})
    config, _ = apply_preset(given, H200)
    assert config.tf32 is True
    assert config.track_stats is False
