"""Names, support and resolution of precisions."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from hpo.device import DeviceInfo
from hpo.errors import Failed, InputError, Unsupported
from hpo.precision.table import (
    PRECISION_NAMES,
    PRECISIONS,
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


def gpu(*capability: int, **facts: object) -> DeviceInfo:
    known = DeviceInfo(type="cuda", name="Test GPU", compute_capability=capability or None)
    return replace(known, **facts)


def amd_gpu(gcn_arch: str) -> DeviceInfo:
    # PyTorch reports the compute capability (9, 0) for gfx90a, and bf16 for every AMD GPU.
    return gpu(9, 0, gcn_arch=gcn_arch, cuda_bf16=True)


P100, T4, A100, H200, UNKNOWN_GPU = gpu(6, 0), gpu(7, 5), gpu(8, 0), gpu(9, 0), gpu()
OLD_CPU, AMX = cpu("avx2"), cpu("avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_bf16")


def test_names_and_ranges() -> None:
    aliases = {"none": "fp32", "32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
    assert {name: canonical_precision(name) for name in aliases} == aliases
    assert [canonical_precision(name) for name in PRECISION_NAMES] == [*PRECISION_NAMES]
    with pytest.raises(ValueError, match=r"no precision is called 'bf61'\. Did you mean `bf16`"):
        canonical_precision("bf61")
    assert [name for name, one in PRECISIONS.items() if one.changes_weights] == ["bf16-true", "fp8"]
    bad = {"init_scale": (0, 1e39), "growth_factor": (1,), "backoff_factor": (0, 1)}
    for key, values in (bad | {"memory_fraction": (0, 1.01), "max_fp32_fallbacks": (-1,)}).items():
        for value in values:
            with pytest.raises(ValidationError, match=key):
                AmpConfig.model_validate({key: value})
    AmpConfig(growth_factor=1.5, backoff_factor=0.99, memory_fraction=1, max_fp32_fallbacks=0)


@pytest.mark.parametrize(
    ("device", "levels"),  # fp32, tf32, bf16, fp16, bf16-true, fp8: native, emulated or unsupported
    [
        (OLD_CPU, "nueeeu"),
        (cpu("avx2", "avx512"), "nueeeu"),
        (cpu("avx512", "avx512_bf16"), "nunenu"),
        (cpu("avx512", "avx512_fp16"), "nueneu"),
        (AMX, "nunnnu"),
        (cpu("amx_bf16", "amx_fp16"), "nunnnu"),
        (cpu("arm_bf16"), "nunenu"),
        (cpu("arm_fp16"), "nueneu"),
        (P100, "nueeeu"),
        (gpu(7, 0), "nueneu"),
        (T4, "nueneu"),
        (A100, "nnnnnu"),
        (gpu(8, 9), "nnnnnn"),
        (H200, "nnnnnn"),
        (replace(H200, has_torchao=False), "nnnnnu"),
        (replace(H200, cuda_bf16=False), "nnenen"),
        (replace(T4, cuda_bf16=True), "nunnnu"),
        (UNKNOWN_GPU, "nueeeu"),
        (amd_gpu("gfx908:sramecc+:xnack-"), "nunnnu"),  # MI100
        (amd_gpu("gfx90a:sramecc+:xnack-"), "nunnnu"),  # MI250X
        (amd_gpu("gfx1201"), "nunnnu"),  # RX 9070
        (amd_gpu("gfx906:sramecc+:xnack-"), "nueeeu"),  # MI50: no matrix instructions
        (amd_gpu("unknown"), "nueeeu"),
    ],
)
def test_support_by_device(device: DeviceInfo, levels: str) -> None:
    supports = [support(name, device) for name in PRECISION_NAMES]
    assert "".join(one.level[0] for one in supports) == levels
    assert [bool(one.reason) for one in supports] == [one.level != "native" for one in supports]
    best = apply_preset(AmpConfig(), device)[1]
    assert best == ("bf16" if levels[2] == "n" else "fp16" if levels[3] == "n" else best)
    assert support(best, device).level == "native"


@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("bf16", T4, "`bf16` needs compute capability >= 8.0, but this Test GPU has 7.5."),
        ("bf16", UNKNOWN_GPU, "`bf16` needs compute capability >= 8.0, but this Test GPU does not"),
        ("fp16", OLD_CPU, "`fp16` needs a CPU with AVX512-FP16, which this Test CPU lacks."),
        ("tf32", OLD_CPU, "`tf32` needs CUDA with compute capability >= 8.0, but this is a CPU (Test CPU)."),
        ("fp16", amd_gpu("gfx1030"), "`fp16` needs an AMD GPU with matrix instructions for it, and gfx1030"),
        ("fp8", replace(H200, has_torchao=False), "`fp8` needs the package torchao."),
    ],
)
def test_reason_for_missing_support(name: str, device: DeviceInfo, reason: str) -> None:
    assert left_out([name], device, AmpConfig())[name].startswith(reason)
    for policy, end in (("prune", Unsupported), ("skip", Unsupported), ("fail", Failed)):
        with pytest.raises(end) as raised:
            resolve(name, device, AmpConfig.model_validate({"on_unsupported": policy}))
        assert str(raised.value).startswith(reason)
        is_emulated = support(name, device).level == "emulated"
        assert ("amp.allow_emulated: true" in str(raised.value)) == is_emulated


@pytest.mark.parametrize(
    ("requested", "device", "effective"),
    [("bf16", T4, "fp16"), ("bf16", OLD_CPU, "fp32"), ("fp8", A100, "bf16"), ("tf32", T4, "fp32")],
)
def test_fallback_to_a_supported_precision(requested: str, device: DeviceInfo, effective: str) -> None:
    config = AmpConfig(on_unsupported="fallback")
    resolution = resolve(requested, device, config)
    assert (resolution.requested, resolution.effective) == (requested, effective)
    assert f"Ran {effective} instead" in resolution.reason
    assert resolve(effective, device, config).reason == ""


def test_choices_of_a_device() -> None:
    device, allowed = replace(T4, has_bitsandbytes=False), AmpConfig(allow_emulated=True)
    searched = {"fp_precision": ("fp32", "bf16"), "base_precision": ("fp32", "nf4"), "optimizer": ("adamw",)}
    assert list(lacking_choices(searched, device, AmpConfig())) == ["bf16", "base_precision=nf4"]
    assert list(left_out(PRECISION_NAMES, T4, allowed)) == ["tf32", "fp8"]
    assert resolve("bf16", OLD_CPU, allowed).support == "emulated"
    assert "needs the package bitsandbytes" in base_lacks("nf4", device)
    assert [base_lacks(name, device) for name in ("fp32", "bf16", "int8")] == ["", "", ""]
    assert base_lacks("nf4", T4) == ""
    drawn = {"fp_precision": "bf16", "base_precision": "nf4", "optimizer": "adamw"}
    assert named_choices(drawn) == ["bf16", "base_precision=nf4"]


@pytest.mark.parametrize(
    ("preset", "precision", "tf32", "fallback"),
    [("basic", "fp32", False, False), ("advanced", "fp16", True, False), ("ultra", "bf16", True, True)],
)
def test_presets(preset: str, precision: str, tf32: bool, fallback: bool) -> None:
    config, name = apply_preset(AmpConfig.model_validate({"preset": preset}), OLD_CPU)
    assert (name, config.tf32, config.fallback_to_fp32) == (precision, tf32, fallback)
    assert config.cudnn_benchmark == config.track_stats == (preset != "basic")
    assert config.max_fp32_fallbacks == 3
    changed = AmpConfig.model_validate({"preset": preset, "tf32": not tf32, "track_stats": False})
    assert apply_preset(changed, OLD_CPU)[0].tf32 is not tf32
    assert apply_preset(changed, OLD_CPU)[0].track_stats is False


@pytest.mark.parametrize("settings", [{"preset": "ultra"}, {"tf32": True}])
def test_amd_gpu_refuses_tf32(settings: dict[str, object]) -> None:
    config = AmpConfig.model_validate(settings)
    with pytest.raises(InputError, match=r"amp\.tf32 must be false on the AMD GPU .* Set `amp\.tf32: false`"):
        apply_preset(config, amd_gpu("gfx942"))
    assert apply_preset(config.model_copy(update={"tf32": False}), amd_gpu("gfx942"))[0].tf32 is False
