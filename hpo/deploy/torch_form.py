"""The forms that PyTorch runs: the trial's fp32 weights with the precision to compute in."""

from dataclasses import replace
from pathlib import Path

from hpo.models.encoder import attention_on
from hpo.models.export import export_model, load_exported, read_metadata


def export_in_precision(
    exported: Path, folder: Path, precision: str, device: str, *, trust_remote_code: bool
) -> Path:
    """Write a copy of the model with another precision, and an attention that the device has."""
    trained = str(read_metadata(exported)["attention"])
    attention = attention_on(device.partition(":")[0], trained) or trained
    network, tokenizer, settings = load_exported(
        exported, attention=attention, trust_remote_code=trust_remote_code
    )
    return export_model(
        network, tokenizer, folder, replace(settings, precision=precision, attention=attention)
    )
