"""The deployable forms of a model: their names, the forms that a device can run, and their builder."""

from collections.abc import Collection
from pathlib import Path

from hpo.deploy import onnx_fp32, onnx_int8
from hpo.deploy.torch_form import export_in_precision
from hpo.device import DeviceInfo
from hpo.errors import InputError, did_you_mean
from hpo.inference.model import TrainedModel, load
from hpo.inference.onnx_network import missing_packages
from hpo.precision.table import support

REFERENCE = "fp32"
ONNX_FORMS = ONNX_FP32, ONNX_INT8 = "onnx_fp32", "onnx_int8_dynamic"
NAMES = (REFERENCE, "bf16", "fp16", *ONNX_FORMS)

_WEIGHTS = (".safetensors", ".onnx", ".data", ".bin")


def parse_names(names: str) -> tuple[str, ...]:
    """Split a list such as `bf16,onnx_fp32`. Raises InputError for an unknown name."""
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in NAMES:
            raise InputError(f"--artifacts: there is no {name!r}.{did_you_mean(name, NAMES)}")
    if not chosen:
        raise InputError(f"--artifacts must name some of {', '.join(NAMES)}.")
    return chosen


def possible_forms(
    device: DeviceInfo, names: Collection[str] = NAMES
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the forms in `names` that the device can run, fp32 first, and the reason against each other."""
    reasons = {name: _why_not(name, device) for name in NAMES[1:] if name in names}
    possible = (REFERENCE, *(name for name, reason in reasons.items() if not reason))
    return possible, {name: reason for name, reason in reasons.items() if reason}


def _why_not(name: str, device: DeviceInfo) -> str:
    if name in ONNX_FORMS:
        return missing_packages() if device.type == "cpu" else "ONNX forms run on a CPU alone: --device cpu."
    supported = support(name, device)
    return "" if supported.level == "native" else supported.reason


class ArtifactBuilder:
    """Builds the forms of the model in `exported`, each in a subfolder of `folder` with its name."""

    def __init__(self, exported: Path, folder: Path, device: str, *, trust_remote_code: bool) -> None:
        self._exported = exported
        self._folder = folder
        self._device = device
        self._trust = trust_remote_code

    def build(self, name: str) -> Path:
        """Build a form unless it exists. Raises ModelError if the model has no such form."""
        folder = self._folder / name
        if folder.exists():
            return folder
        if name == ONNX_FP32:
            return onnx_fp32.export_onnx(self.load(REFERENCE), folder)
        if name == ONNX_INT8:
            return onnx_int8.quantize(self.build(ONNX_FP32), folder)
        return export_in_precision(self._exported, folder, name, self._device, trust_remote_code=self._trust)

    def load(self, name: str) -> TrainedModel:
        """Load a form in its precision."""
        precision = None if name in ONNX_FORMS else name
        return load(self.build(name), device=self._device, precision=precision, trust_remote_code=self._trust)


def weight_bytes(folder: Path) -> int:
    """Return the size of a form's weights."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in _WEIGHTS)
