"""The table of precisions, their support by devices, and the precision of a trial.

A row of the table has the dtype of the weights, the dtype of matrix products under autocast, TF32, and loss
scaling. bf16 keeps fp32's exponent (8 bits) and loses mantissa (8 bits with the hidden one), so nothing
overflows but every product is rounded to about 3 significant digits. fp16 keeps 11 bits of mantissa and only
5 of exponent: its largest number is 65504, its smallest normal one 6.1e-5. Activations overflow and gradients
vanish unless the loss is scaled up before the backward pass and down before the update (Micikevicius et al.
2018, arXiv 1710.03740). TF32 rounds the inputs of an fp32 product to 11 bits.

Support means *native* support. PyTorch computes bf16 and fp16 without the instructions too, tens of times
slower than fp32; this is `emulated`, and a study must allow it. `resolve` never replaces a precision
silently: it returns the requested one, or another one with the reason, or raises.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from hpo.device import DeviceInfo
from hpo.errors import Failed, InputError, Unsupported, did_you_mean
from hpo.section import Count, Section, Switch, Whole
from hpo.versions import install_hint

SupportLevel = Literal["native", "emulated", "unsupported"]

PRECISION = "fp_precision"
BASE_PRECISION = "base_precision"
"""Setting for the storage of frozen weights under an adapter."""
OPTIMIZER_STATE = "optimizer_state"
"""Setting for the storage of the optimiser's moments."""


@dataclass(frozen=True)
class Precision:
    """A row of the table. dtypes by PyTorch's names."""

    name: str
    weights: str = "float32"
    autocast: str | None = None
    """dtype of matrix products under autocast; None: autocast is off."""
    tf32: bool = False
    loss_scaling: bool = False
    float8: bool = False
    """Linear layers are replaced by torchao's float8 ones."""
    aliases: tuple[str, ...] = ()
    falls_back_to: str | None = None
    """The next precision under `amp.on_unsupported: fallback`."""
    frozen: str = "fp32"
    """The `base_precision` of frozen linear layers. fp32: like `weights`."""
    keeps_rotary: bool = True
    """Rotary frequencies stay in fp32 beside weights in bf16. False for a model that fails so: its code does
    not cast their results."""

    @property
    def changes_weights(self) -> bool:
        """True if it converts fp32 weights."""
        return self.float8 or self.weights != "float32"

    @property
    def linear_dtype(self) -> str:
        """dtype of a linear layer's output."""
        return self.autocast or self.weights

    @property
    def products(self) -> str:
        """Format of matrix products: `float8`, `tf32` or a dtype."""
        return "float8" if self.float8 else "tf32" if self.tf32 else self.linear_dtype


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", aliases=("none", "32-true")),
        Precision("tf32", tf32=True, falls_back_to="fp32"),
        Precision("bf16", autocast="bfloat16", aliases=("bf16-mixed",), falls_back_to="fp16"),
        Precision("fp16", autocast="float16", loss_scaling=True, aliases=("16-mixed",), falls_back_to="fp32"),
        Precision("bf16-true", weights="bfloat16", falls_back_to="bf16"),
        Precision("fp8", autocast="bfloat16", float8=True, falls_back_to="bf16"),
    )
}
PRECISION_NAMES = tuple(PRECISIONS)
ALIASES = {alias: precision.name for precision in PRECISIONS.values() for alias in precision.aliases}


def canonical_precision(name: str) -> str:
    """`bf16-mixed` -> `bf16`. Raises ValueError for an unknown name."""
    canonical = ALIASES.get(name, name)
    if canonical not in PRECISIONS:
        known = [*PRECISION_NAMES, *ALIASES]
        raise ValueError(f"no precision is called {name!r}.{did_you_mean(str(name), known)}")
    return canonical


class AmpConfig(Section):
    """Mixed precision and loss scaling. A missing key takes the value of the preset."""

    preset: Literal["auto", "basic", "advanced", "ultra"] = "auto"
    """`basic`: fp32, nothing else. `advanced`: fp16, TF32 for the products left in fp32, cudnn benchmark,
    statistics. `ultra`: like `advanced` with bf16, and micro-batches with a loss that is not finite run again
    in fp32. `auto`: the best native precision of the device. The preset's precision counts only if
    `fp_precision` is neither fixed nor searched."""
    on_unsupported: Literal["skip", "prune", "fallback", "fail"] = "skip"
    """For a precision that the device lacks. `skip`: the worker draws it in no trial and leaves it to other
    devices. `prune`: the trial ends as `unsupported`. `fallback`: the trial runs the nearest precision (bf16,
    fp16, fp32), records the change and does not count in precision statistics. `fail`: it ends as `failed`.
    """
    allow_emulated: Switch = False
    """Run emulated (slow) precisions instead of treating them as unsupported. The trial records this."""
    init_scale: float = Field(65536.0, ge=1e-37, le=1e38)
    """fp16: first factor of the loss."""
    growth_factor: float = Field(2.0, gt=1)
    """fp16: the scale grows by this factor."""
    backoff_factor: float = Field(0.5, gt=0, le=0.99)
    """fp16: the scale shrinks by this factor when gradients overflow."""
    growth_interval: Count = 2000
    """fp16: steps without an overflow before the scale grows."""
    min_scale: float = Field(1.0, ge=1e-37)
    """fp16: an overflow with the scale at or under this floor ends the trial as `nonfinite`."""
    tf32: Switch | None = None
    """TF32 for the fp32 products under autocast. `fp_precision: fp32` stays IEEE fp32. Must be false on AMD
    GPUs."""
    cudnn_benchmark: Switch | None = None
    """`torch.backends.cudnn.benchmark`."""
    fallback_to_fp32: Switch | None = None
    """Run a micro-batch whose loss is not finite again in fp32. Costs a device sync for every micro-batch."""
    max_fp32_fallbacks: Whole = Field(3, ge=0)
    """Most fp32 repeats in one epoch; one more ends the trial as `nonfinite`."""
    memory_fraction: float | None = Field(None, gt=0, le=1)
    """CUDA: one worker's share of the device's memory."""
    track_stats: Switch | None = None
    """Keep statistics of the loss scale and of skipped steps."""


_SWITCHES = ("tf32", "cudnn_benchmark", "fallback_to_fp32", "track_stats")
PRESETS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "basic": ("fp32", ()),
    "advanced": ("fp16", ("tf32", "cudnn_benchmark", "track_stats")),
    "ultra": ("bf16", _SWITCHES),
    "auto": (None, ("cudnn_benchmark", "track_stats")),
}
"""{preset: (its precision, switches turned on)}. None: the best precision of the device."""

_AUTO_ORDER = ("bf16", "fp16", "tf32", "fp32")
"""The fastest first. All of them rarely change a result."""


def apply_preset(config: AmpConfig, device: DeviceInfo) -> tuple[AmpConfig, str]:
    """Return the config with all switches set, and the preset's precision on `device`.

    Raises InputError for TF32 on an AMD GPU.
    """
    precision, switched_on = PRESETS[config.preset]
    filled = {name: name in switched_on for name in _SWITCHES if getattr(config, name) is None}
    filled_config = config.model_copy(update=filled)
    if device.gcn_arch and filled_config.tf32:
        raise InputError(
            f"amp.tf32 must be false on the AMD GPU {device.name}, where nobody has checked TF32, but the "
            f"preset {config.preset} or the study sets it. Set `amp.tf32: false`."
        )
    best_native = next(name for name in _AUTO_ORDER if support(name, device).level == "native")
    return filled_config, precision or best_native


@dataclass(frozen=True)
class Support:
    """Support of a precision by a device. `reason` is empty if it is native."""

    level: SupportLevel
    reason: str = ""


# By `Precision.products`: the first CUDA compute capability and the CPU features with instructions for them.
_CAPABILITY = {"float8": (8, 9), "tf32": (8, 0), "bfloat16": (8, 0), "float16": (7, 0), "float32": (0, 0)}
_CPUS = {
    "bfloat16": ("AMX or AVX512-BF16", {"amx_bf16", "avx512_bf16", "arm_bf16"}),
    "float16": ("AVX512-FP16", {"avx512_fp16", "amx_fp16", "arm_fp16"}),
}
# AMD GPUs with matrix instructions for both bf16 and fp16: MFMA of CDNA 1 to 4, WMMA of RDNA 3, 3.5 and 4.
# Sources: AMD's "Instruction Set Architecture" reference guides of these, chapters on matrix instructions;
# LLVM, "User Guide for AMDGPU Backend", for the names. On gfx90a they flush subnormal numbers to zero
# (PyTorch, "Numerical accuracy").
_AMD_MATRICES = {
    *("gfx908", "gfx90a", "gfx942", "gfx950"),
    *("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    *("gfx1200", "gfx1201"),
}


def support(name: str, device: DeviceInfo) -> Support:
    """Return the support of a precision: native, emulated or unsupported.

    Sources: CUDA programming guide, "Arithmetic instructions" by compute capability; oneDNN, "Data
    types", for CPUs; torchao's float8 training needs compute capability 8.9.
    """
    products = PRECISIONS[name].products
    level: SupportLevel = "unsupported" if products in ("float8", "tf32") else "emulated"
    if device.gcn_arch:
        reason = _lack_of_amd_gpu(name, level, device)
    elif device.type == "cpu":
        reason = _lack_of_cpu(name, level, device)
    else:
        reason = _lack_of_nvidia_gpu(name, device)
    return Support(level, reason) if reason else Support("native")


def _lack_of_cpu(name: str, level: SupportLevel, device: DeviceInfo) -> str:
    products = PRECISIONS[name].products
    if level == "unsupported":
        needed = "CUDA with compute capability >= {}.{}".format(*_CAPABILITY[products])
        return f"`{name}` needs {needed}, but this is a CPU ({device.name})."
    wanted, features = _CPUS.get(products, ("", device.cpu_features))
    if not wanted or features & device.cpu_features:
        return ""
    return f"`{name}` needs a CPU with {wanted}, which this {device.name} lacks."


def _lack_of_nvidia_gpu(name: str, device: DeviceInfo) -> str:
    products, capability = PRECISIONS[name].products, device.compute_capability
    if products == "float8" and not device.has_torchao:
        return f"`fp8` needs the package torchao. {install_hint('fp8')}"
    is_native = (capability or (0, 0)) >= _CAPABILITY[products]
    if products == "bfloat16" and device.cuda_bf16 is not None:
        is_native = device.cuda_bf16
    if is_native:
        return ""
    needed = "compute capability >= {}.{}".format(*_CAPABILITY[products])
    has = "does not report its own" if capability is None else "has {}.{}".format(*capability)
    return f"`{name}` needs {needed}, but this {device.name} {has}."


def _lack_of_amd_gpu(name: str, level: SupportLevel, device: DeviceInfo) -> str:
    if level == "unsupported":
        return f"`{name}` is not supported on AMD GPUs: nobody has checked it on one."
    if PRECISIONS[name].products == "float32" or device.gcn_name in _AMD_MATRICES:
        return ""
    return (
        f"`{name}` needs an AMD GPU with matrix instructions for it, and {device.gcn_name} ({device.name}) "
        "is not known to have them."
    )


@dataclass(frozen=True)
class Resolution:
    """The precision of a trial, and the reason if it is not the requested one."""

    requested: str
    effective: str
    support: SupportLevel
    reason: str = ""
    base: str = "fp32"
    """The `base_precision`."""

    @property
    def precision(self) -> Precision:
        return replace(PRECISIONS[self.effective], frozen=self.base)


def resolve(requested: str, device: DeviceInfo, config: AmpConfig) -> Resolution:
    """Return the precision for a trial that requests `requested` on `device`.

    If the device lacks it, or emulates it without the study's consent, raises Unsupported under
    `on_unsupported: skip` and `prune`, and Failed under `fail`.
    """
    answer = support(requested, device)
    if _usable(answer, config):
        return Resolution(requested, requested, answer.level, answer.reason)
    effective = requested
    while not _usable(support(effective, device), config):
        effective = PRECISIONS[effective].falls_back_to or "fp32"
    if config.on_unsupported != "fallback":
        hint = ", or set amp.allow_emulated: true to run it emulated" if answer.level == "emulated" else ""
        end = Failed if config.on_unsupported == "fail" else Unsupported
        raise end(f"{answer.reason} Use {effective}{hint}.")
    return Resolution(
        requested, effective, support(effective, device).level, f"{answer.reason} Ran {effective} instead."
    )


def left_out(precisions: Iterable[str], device: DeviceInfo, config: AmpConfig) -> dict[str, str]:
    """Return {precision: reason} of the precisions that `device` cannot run."""
    answers = {name: support(name, device) for name in precisions}
    return {name: one.reason for name, one in answers.items() if not _usable(one, config)}


def lacking_choices(
    values: Mapping[str, Iterable[Any]], device: DeviceInfo, config: AmpConfig
) -> dict[str, str]:
    """Return {choice_name: reason} of the values that `device` lacks. `values` are by setting."""
    bases = {name: base_lacks(name, device) for name in values.get(BASE_PRECISION, ())}
    return left_out(values.get(PRECISION, ()), device, config) | {
        choice_name(BASE_PRECISION, name): reason for name, reason in bases.items() if reason
    }


def _usable(answer: Support, config: AmpConfig) -> bool:
    return answer.level == "native" or (answer.level == "emulated" and config.allow_emulated)


def choice_name(setting: str, value: object) -> str:
    """Return the name of a choice: `bf16` for `fp_precision: bf16`, or `base_precision=nf4`."""
    return str(value) if setting == PRECISION else f"{setting}={value}"


def named_choices(params: Mapping[str, Any]) -> list[str]:
    """Return the `choice_name` of each parameter that a device may lack."""
    return [choice_name(name, params[name]) for name in (PRECISION, BASE_PRECISION) if name in params]


def base_lacks(name: str, device: DeviceInfo) -> str:
    """Return why this device cannot run a `base_precision`, or "" if it can."""
    if name == "nf4" and not device.has_bitsandbytes:
        return f"`base_precision: nf4` needs the package bitsandbytes. {install_hint('adapters')}"
    return ""
