"""Makes the artifacts of a trained model: folders that `hpo.load` loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpo.deploy.artifacts import ONNX_REFERENCE, REFERENCE, Artifact
from hpo.inference.model import TrainedModel, load
from hpo.models.encoder import attention_on
from hpo.models.export import export_model, load_exported, read_metadata
from hpo.tasks.example import Example

_WEIGHTS = (".safetensors", ".onnx", ".data", ".bin")


class Workshop:
    """The artifacts of one trained model, each in a folder of its name; `exported` is the export of its
    trial.
    """

    def __init__(
        self, exported: Path, folder: Path, calibration: Sequence[Example], device: str, *, trusted: bool
    ) -> None:
        self._exported = exported
        self._folder = folder
        self._calibration = calibration
        self._device = device
        self._trusted = trusted

    def make(self, artifact: Artifact) -> Path:
        """Make the artifact, unless it is there. Raises ModelError where the model has no such form."""
        folder = self._folder / artifact.name
        if folder.exists():
            return folder
        if not artifact.is_onnx:
            return self._in_precision(artifact, folder)
        from hpo.deploy.onnx_export import export_onnx
        from hpo.deploy.quantize import quantize

        if artifact.quantization is None:
            return export_onnx(self.load(REFERENCE), folder)
        return quantize(self.make(ONNX_REFERENCE), folder, artifact.quantization, self._calibration)

    def load(self, artifact: Artifact) -> TrainedModel:
        """The model of the artifact, in the precision that it has its name from."""
        precision = None if artifact.is_onnx else artifact.precision
        return load(
            self.make(artifact),
            device=self._device,
            precision=precision,
            trust_remote_code=self._trusted,
        )

    def _in_precision(self, artifact: Artifact, folder: Path) -> Path:
        """The same weights, which `hpo.load` runs in the artifact's precision, by an attention that
        the device has, where nothing else is asked."""
        trained = str(read_metadata(self._exported)["attention"])
        attention = attention_on(self._device.partition(":")[0], trained)
        network, tokenizer, settings = load_exported(
            self._exported, attention=attention, trust_remote_code=self._trusted
        )
        settings = replace(settings, precision=artifact.precision, attention=attention)
        return export_model(network, tokenizer, folder, settings)


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in _WEIGHTS)
