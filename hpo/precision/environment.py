"""Environment variables with an effect on precision behind PyTorch's flags.

Every trial records them. A variable that can make a precision of the device untrue is refused, because each
trial is compared with fp32. Libraries read it at their start, so this process cannot undo it.

Sources: oneDNN, "Primitive Attributes: floating-point math mode" and "CPU Dispatcher Control"; PyTorch, "CUDA
Environment Variables"; NVIDIA, "Accelerating AI Training with NVIDIA TF32 Tensor Cores"; cuBLAS, "Floating
Point Emulation"; Triton's `knobs.py` and Inductor's `config.py`; for AMD GPUs, PyTorch, "Numerical accuracy",
and AMD, "ROCm environment variables".
"""

import os
from collections.abc import Mapping

from hpo.errors import InputError

_MATH = ("cpu", ("STRICT",), "oneDNN may then compute fp32 products in less")
_ISA = ("cpu", ("ALL", "DEFAULT"), "oneDNN may then emulate bf16 and fp16")
_REFUSED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "ONEDNN_DEFAULT_FPMATH_MODE": _MATH,
    "DNNL_DEFAULT_FPMATH_MODE": _MATH,
    "ONEDNN_MAX_CPU_ISA": _ISA,
    "DNNL_MAX_CPU_ISA": _ISA,
    "NVIDIA_TF32_OVERRIDE": ("cuda", (), "NVIDIA's libraries then decide on TF32, and not the precision"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (
        "cuda",
        ("0", "FALSE", "OFF"),
        "PyTorch then lets cuBLAS compute fp32 products in TF32",
    ),
}
"""{variable: (type of device, harmless values, effect of others)}."""
WATCHED = (
    *_REFUSED,
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
    "HIPBLASLT_ALLOW_TF32",
    "HSA_OVERRIDE_GFX_VERSION",
    "MIOPEN_DEBUG_CONVOLUTION_ATTRIB_FP16_ALT_IMPL",
    "ROCBLAS_INTERNAL_FP16_ALT_IMPL",
    "TRITON_F32_DEFAULT",
    "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_USE_FAST_MATH",
)


def environment_overrides(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: environment[name] for name in WATCHED if environment.get(name)}


def refuse_overrides(device_type: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise InputError for a variable that can make a precision of this type of device untrue."""
    for name, value in environment_overrides(environment).items():
        of_type, harmless, effect = _REFUSED.get(name, ("", (), ""))
        if of_type == device_type and value.upper() not in harmless:
            raise InputError(f"{name} must not be set to {value}: {effect}. Unset it.")
