"""Names, support and resolution of precisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpo.device import DeviceInfo
from hpo.errors import InputError, Unsupported
from hpo.precision.table import (
    PRECISION_NAMES,
    AmpConfig,
    apply_preset,
    base_lacks,
    canonical_precision,
    lacking_choices,
    left_out,
    named_choices,
    resolve,
    support,
)


def cpu(*features: str) -> DeviceInfo:
    return DeviceInfo(type="cpu", name="Test CPU", cpu_features=frozenset(features))


def gpu(major: int, minor: int, *, bf16: bool | None = None) -> DeviceInfo:
    return DeviceInfo(type="cuda", name="Test GPU", compute_capability=(major, minor), cuda_bf16=bf16)


P100, V100, T4, A100, ADA, H200 = gpu(6, 0), gpu(7, 0), gpu(7, 5), gpu(8, 0), gpu(8, 9), gpu(9, 0)
UNKNOWN_GPU = DeviceInfo(type="cuda", name="Test GPU")


def amd_gpu(gcn_arch: str) -> DeviceInfo:
    return DeviceInfo(type="cuda", name="AMD Test GPU", gcn_arch=gcn_arch)


def test_names() -> None:
    aliases = {"none": "fp32", "32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
    assert {name: canonical_precision(name) for name in aliases} == aliases
    assert [canonical_precision(name) for name in PRECISION_NAMES] == [*PRECISION_NAMES]
    with pytest.raises(ValueError, match=r"no precision is called 'bf61'\. Did you mean `bf16`"):
        canonical_precision("bf61")


OLD_CPU, AMX = cpu("avx2"), cpu("avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_bf16")


DEVICES = {
    "old CPU": OLD_CPU,
    "AVX-512": cpu("avx2", "avx512"),
    "AVX512-BF16": cpu("avx512", "avx512_bf16"),
    "AVX512-FP16": cpu("avx512", "avx512_fp16"),
    "AMX": AMX,
    "AMX-FP16": cpu("amx_bf16", "amx_fp16"),
    "Arm with bf16": cpu("arm_bf16"),
    "Arm with fp16": cpu("arm_fp16"),
    "P100": P100,
    "V100": V100,
    "T4": T4,
    "A100": A100,
    "Ada": ADA,
    "H200": H200,
    "H200 without packages": replace(H200, has_torchao=False, has_bitsandbytes=False),
    "unknown GPU": UNKNOWN_GPU,
}
LEVELS = {  # n: native, e: emulated, u: unsupported; in the order of DEVICES
    "fp32": "nnnnnnnnnnnnnnnn",
    "tf32": "uuuuuuuuuuunnnnu",
    "bf16": "eenennneeeennnne",
    "bf16-true": "eenennneeeennnne",
    "fp16": "eeennnenennnnnne",
    "fp8": "uuuuuuuuuuuunnuu",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PRECISION_NAMES)
def test_support_by_device(name: str, device: str) -> None:
    found = support(name, DEVICES[device])
    assert found.level[0] == dict(zip(DEVICES, LEVELS[name], strict=True))[device]
    assert bool(found.reason) == (found.level != "native")


def test_probe_of_bf16_overrides_the_compute_capability() -> None:
    assert support("bf16", gpu(9, 0, bf16=False)).level == "emulated"
    assert support("bf16", gpu(7, 5, bf16=True)).level == "native"


@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("bf16", T4, "`bf16` needs compute capability >= 8.0, but this Test GPU has 7.5."),
        (
            "bf16",
            UNKNOWN_GPU,
            "`bf16` needs compute capability >= 8.0, but this Test GPU does not report its own.",
        ),
        (
            "fp16",
            amd_gpu("gfx1030"),
            "`fp16` needs an AMD GPU with matrix instructions for it, and gfx1030 (AMD Test GPU) is not",
        ),
        ("fp8", amd_gpu("gfx942"), "`fp8` is not supported on AMD GPUs: nobody has checked it on one."),
    ],
)
def test_reason_for_missing_support(name: str, device: DeviceInfo, reason: str) -> None:
    assert support(name, device).reason.startswith(reason)
    with pytest.raises(Unsupported) as raised:
        resolve(name, device, AmpConfig(on_unsupported="prune"))
    assert str(raised.value).startswith(reason)
    if device is T4:
        assert str(raised.value).endswith("Use fp16, or set amp.allow_emulated: true to run it emulated.")


@pytest.mark.parametrize(
    ("gcn_arch", "half"),
    [
        ("gfx908:sramecc+:xnack-", "native"),  # MI100
        ("gfx90a:sramecc+:xnack-", "native"),  # MI250X
        ("gfx1201", "native"),  # RX 9070
        ("gfx906:sramecc+:xnack-", "emulated"),  # MI50: no matrix instructions
        ("gfx1030", "emulated"),  # RX 6900 XT: no matrix instructions
        ("unknown", "emulated"),
    ],
)
def test_support_by_architecture_of_an_amd_gpu(gcn_arch: str, half: str) -> None:
    # PyTorch reports compute capability (9, 0) for gfx90a and says that every AMD GPU has bf16.
    device = replace(amd_gpu(gcn_arch), compute_capability=(9, 0), cuda_bf16=True)
    levels = {name: support(name, device).level for name in PRECISION_NAMES}
    assert levels == dict.fromkeys(("bf16", "fp16", "bf16-true"), half) | {
        "fp32": "native",
        "tf32": "unsupported",
        "fp8": "unsupported",
    }
    reasons = left_out(PRECISION_NAMES, device, AmpConfig())
    assert all("compute capability" not in reason for reason in reasons.values())
    assert apply_preset(AmpConfig(), device)[1] == ("bf16" if half == "native" else "fp32")


@pytest.mark.parametrize("given", [{"preset": "ultra"}, {"tf32": True}])
def test_amd_gpu_refuses_tf32(given: dict[str, object]) -> None:
    config = AmpConfig.model_validate(given)
    with pytest.raises(InputError, match=r"amp\.tf32 must be false on the AMD GPU .* Set `amp\.tf32: false`"):
        apply_preset(config, amd_gpu("gfx942"))
    assert apply_preset(config.model_copy(update={"tf32": False}), amd_gpu("gfx942"))[0].tf32 is False


@pytest.mark.parametrize("device", [H200, AMX], ids=["GPU", "CPU"])
def test_nf4_needs_bitsandbytes(device: DeviceInfo) -> None:
    assert base_lacks("nf4", device) == ""
    without = replace(device, has_bitsandbytes=False)
    assert [base_lacks(name, without) for name in ("fp32", "bf16", "int8")] == ["", "", ""]
    assert "needs the package bitsandbytes" in base_lacks("nf4", without)


def test_choices_of_a_device() -> None:
    device = replace(T4, has_bitsandbytes=False)
    searched = {"fp_precision": ("fp32", "bf16"), "base_precision": ("fp32", "nf4"), "optimizer": ("adamw",)}
    assert list(lacking_choices(searched, device, AmpConfig())) == ["bf16", "base_precision=nf4"]
    allowed = AmpConfig(allow_emulated=True)
    assert list(left_out(PRECISION_NAMES, T4, allowed)) == ["tf32", "fp8"]
    assert resolve("bf16", OLD_CPU, allowed).support == "emulated"
    drawn = {"fp_precision": "bf16", "base_precision": "nf4", "optimizer": "adamw"}
    assert named_choices(drawn) == ["bf16", "base_precision=nf4"]
    assert named_choices({"optimizer": "adamw"}) == []


@pytest.mark.parametrize(
    ("requested", "device", "effective"),
    [("bf16", T4, "fp16"), ("bf16", OLD_CPU, "fp32"), ("fp8", A100, "bf16"), ("tf32", T4, "fp32")],
)
def test_fallback_to_a_supported_precision(requested: str, device: DeviceInfo, effective: str) -> None:
    resolution = resolve(requested, device, AmpConfig(on_unsupported="fallback"))
    assert (resolution.requested, resolution.effective) == (requested, effective)
    assert f"Ran {effective} instead" in resolution.reason
    assert resolve(effective, device, AmpConfig(on_unsupported="fallback")).reason == ""


@pytest.mark.parametrize(
    ("device", "name"), [(H200, "bf16"), (T4, "fp16"), (P100, "fp32"), (OLD_CPU, "fp32"), (AMX, "bf16")]
)
def test_auto_preset(device: DeviceInfo, name: str) -> None:
    assert apply_preset(AmpConfig(), device)[1] == name


@pytest.mark.parametrize(
    ("preset", "precision", "tf32", "fallback"),
    [("basic", "fp32", False, False), ("advanced", "fp16", True, False), ("ultra", "bf16", True, True)],
)
def test_presets(preset: str, precision: str, tf32: bool, fallback: bool) -> None:
    config, name = apply_preset(AmpConfig.model_validate({"preset": preset}), OLD_CPU)
    changed = AmpConfig.model_validate({"preset": preset, "tf32": not tf32, "track_stats": False})
    assert apply_preset(changed, OLD_CPU)[0].tf32 is not tf32
    assert apply_preset(changed, OLD_CPU)[0].track_stats is False
    assert (name, config.tf32, config.fallback_to_fp32) == (precision, tf32, fallback)
    assert config.cudnn_benchmark == config.track_stats == (preset != "basic")
    assert config.max_fp32_fallbacks == 3
