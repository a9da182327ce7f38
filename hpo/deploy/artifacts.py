"""The forms in which a trained model can be deployed, and which of them a machine can have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from hpo.device import DeviceInfo
from hpo.errors import InputError, did_you_mean
from hpo.inference.onnx_network import missing_packages
from hpo.precision.table import support

Quantization = Literal["dynamic", "static"]
"""Where the ranges of activations in int8 come from: each batch, or texts of the training split."""


@dataclass(frozen=True)
class Artifact:
    """One form of a model."""

    name: str
    precision: str = "fp32"
    """That PyTorch computes in; of an ONNX model the one that it is made from."""
    is_onnx: bool = False
    quantization: Quantization | None = None
    """None: weights and activations stay as they are."""


REFERENCE = Artifact("fp32")
"""What the others are compared with."""
ONNX_REFERENCE = Artifact("onnx_fp32", is_onnx=True)
"""What the ones in int8 are made from."""
ARTIFACTS = (
    REFERENCE,
    Artifact("bf16", "bf16"),
    Artifact("fp16", "fp16"),
    ONNX_REFERENCE,
    Artifact("onnx_int8_dynamic", is_onnx=True, quantization="dynamic"),
    Artifact("onnx_int8_static", is_onnx=True, quantization="static"),
)
NAMES = tuple(artifact.name for artifact in ARTIFACTS)


def parse_names(names: str) -> tuple[str, ...]:
    """`bf16,onnx_fp32` as a tuple. Raises InputError for a name that is none."""
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in NAMES:
            raise InputError(f"--artifacts: there is no {name!r}.{did_you_mean(name, NAMES)}")
    if not chosen:
        raise InputError(f"--artifacts must name some of {', '.join(NAMES)}.")
    return chosen


def artifacts_of(
    device: DeviceInfo, names: Collection[str] = NAMES
) -> tuple[tuple[Artifact, ...], dict[str, str]]:
    """Those of `names` that the device can have, fp32 always first; of the others the reason why not."""
    possible, left_out = [REFERENCE], {}
    for artifact in ARTIFACTS[1:]:
        if artifact.name not in names:
            continue
        if reason := _why_not(artifact, device):
            left_out[artifact.name] = reason
        else:
            possible.append(artifact)
    return tuple(possible), left_out


def _why_not(artifact: Artifact, device: DeviceInfo) -> str:
    if artifact.is_onnx:
        if device.type != "cpu":
            return "onnxruntime is measured on a CPU alone: --device cpu."
        return missing_packages()
    supported = support(artifact.precision, device)
    return "" if supported.level == "native" else supported.reason
