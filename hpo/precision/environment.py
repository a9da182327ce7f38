"""Environment variables by which libraries change a precision behind PyTorch's flags.

PyTorch's switches do not show them, so what is set is recorded on every trial. A variable that makes the
trial's precision untrue is refused: libraries read it when they are loaded, so this process cannot undo it.
One that makes fp32 untrue is always refused: the compatibility check compares with fp32, and single
micro-batches may run in it, whatever the precision is.

Sources: oneDNN, "Primitive Attributes: floating-point math mode" and "CPU Dispatcher Control"; PyTorch, "CUDA
Environment Variables"; NVIDIA, "Accelerating AI Training with NVIDIA TF32 Tensor Cores"; cuBLAS, "Floating
Point Emulation"; Triton's `knobs.py` and Inductor's `config.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from hpo.errors import EnvironmentOverrideError
from hpo.precision.table import PRECISIONS, AmpConfig

ONEDNN_MATH = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
ONEDNN_ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
NVIDIA_TF32, TORCH_TF32 = "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
WATCHED = (
    *ONEDNN_MATH,
    *ONEDNN_ISA,
    NVIDIA_TF32,
    TORCH_TF32,
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
    "HIPBLASLT_ALLOW_TF32",
    "TRITON_F32_DEFAULT",
    "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_USE_FAST_MATH",
)

_MATH = {"BF16": "bf16", "F16": "fp16", "TF32": "TF32", "ANY": "bf16 or fp16"}
_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_ISA_WITHOUT = {"bfloat16": _WITHOUT_BF16, "float16": (*_WITHOUT_BF16, "AVX512_CORE_BF16")}
"""The settings under which oneDNN has no instructions for products of the dtype."""


def environment_overrides(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of the variables that are set."""
    return {name: environment[name] for name in WATCHED if environment.get(name)}


def refuse_overrides(
    precisions: Iterable[str],
    config: AmpConfig,
    device_type: str,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raise EnvironmentOverrideError for a variable that makes fp32, one of the precisions, or the native
    support of one untrue."""
    overrides = environment_overrides(environment)
    for name in (*precisions, "fp32"):
        for variable, effect in _untrue(name, config, device_type, overrides):
            raise EnvironmentOverrideError(
                f"{variable} must not be set to {overrides[variable]} for {name}: {effect}. Unset it."
            )


def _untrue(
    name: str, config: AmpConfig, device_type: str, overrides: Mapping[str, str]
) -> Iterable[tuple[str, str]]:
    products = PRECISIONS[name].products
    if device_type == "cpu":
        for variable in ONEDNN_MATH:
            mode = overrides.get(variable, "").upper()
            if products == "float32" and mode in _MATH:
                yield variable, f"oneDNN may then compute fp32 products in {_MATH[mode]}"
        for variable in ONEDNN_ISA:
            if not config.allow_emulated and overrides.get(variable, "").upper() in _ISA_WITHOUT.get(
                products, ()
            ):
                yield variable, f"oneDNN has no instructions for {name} then, and emulates it"
        return
    if NVIDIA_TF32 in overrides:
        is_off = overrides[NVIDIA_TF32] == "0"
        if is_off and products == "tf32":
            yield NVIDIA_TF32, "NVIDIA's libraries then compute in fp32 what should be TF32"
        elif not is_off and products == "float32":
            yield NVIDIA_TF32, "NVIDIA's libraries may then compute fp32 products in TF32"
    if overrides.get(TORCH_TF32, "0").lower() not in ("0", "false", "off") and products == "float32":
        yield TORCH_TF32, "PyTorch then lets cuBLAS compute fp32 products in TF32"
