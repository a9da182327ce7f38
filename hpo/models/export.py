"""A trained model as a folder that `transformers` and this package load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from hpo.data.tasks import Task
from hpo.errors import ModelError, shorten
from hpo.models.encoder import load_encoder, load_tokenizer
from hpo.models.multitask import HeadSettings, MultitaskModel

EXPORT_FORMAT = 1


def export_model(
    model: MultitaskModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    max_length: int,
    attention: str,
    precision: str,
    decisions: Mapping[str, Any],
    float32_parts: Sequence[str] = (),
) -> Path:
    """Write a folder that `transformers.AutoModel` (the encoder) and `load_exported` (all of it) load.

        config.json, model.safetensors, tokenizer.json ...    the encoder and its tokenizer
        heads.safetensors                                     pooling, heads, log variances
        hpo.json                                              tasks, head settings, decisions, max_length

    Weights keep their dtype. `precision`, `float32_parts` and `attention`, those of the trial, are recorded,
    not applied. The folder appears at once or not at all. Raises ModelError where `directory` holds anything
    but an earlier export.
    """
    check_export_folder(directory)
    staging = directory.with_name(f".{directory.name}-{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        model.encoder.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        heads = {
            name: value.contiguous()
            for name, value in model.state_dict().items()
            if not name.startswith("encoder.")
        }
        save_file(heads, staging / "heads.safetensors")
        metadata = {
            "format": EXPORT_FORMAT,
            "tasks": model.tasks,
            **asdict(model.head_settings),
            "attention": attention,
            "max_length": max_length,
            "precision": precision,
            "float32_parts": list(float32_parts),
            "decisions": decisions,
        }
        (staging / "hpo.json").write_text(json.dumps(metadata, indent=2, default=asdict) + "\n")
        # safetensors writes files that only their owner can read, whatever the umask.
        for file in staging.iterdir():
            file.chmod((staging / "hpo.json").stat().st_mode)
        if directory.exists():
            shutil.rmtree(directory)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def check_export_folder(directory: Path) -> None:
    """Raise ModelError unless `directory` is free, or holds an earlier export, and can be written."""
    above = next(path for path in directory.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ModelError(f"{directory}: an export needs a folder that may be made, but {above} is none.")
    if directory.exists() and any(directory.iterdir()) and not (directory / "hpo.json").is_file():
        raise ModelError(f"{directory}: an export needs a folder of its own, but this one holds other files.")


def load_exported(
    directory: str | Path, *, attention: str | None = None, trust_remote_code: bool = False
) -> tuple[MultitaskModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Return model (fp32, evaluation mode), tokenizer and the content of hpo.json.

    `attention` replaces the one that the model was trained with, for a machine that lacks it. Logits are
    those of the exported model, bit for bit, on the same machine in the same precision.

    Raises ModelError where the folder is no intact export.
    """
    directory = Path(directory).resolve()
    try:
        metadata = json.loads((directory / "hpo.json").read_text())
        heads = load_file(directory / "heads.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{directory} must be a folder written by `hpo best --export`, but reading it failed: {error}."
        ) from error
    if metadata.get("format") != EXPORT_FORMAT:
        raise ModelError(
            f"{directory}/hpo.json must have format {EXPORT_FORMAT}, but it has {metadata.get('format')!r}. "
            f"Use the version of hpo that wrote it."
        )
    encoder = load_encoder(
        str(directory), attention=attention or metadata["attention"], trust_remote_code=trust_remote_code
    )
    tasks = [Task(**{**task, "labels": tuple(task["labels"])}) for task in metadata["tasks"]]
    settings = HeadSettings(**{field.name: metadata[field.name] for field in fields(HeadSettings)})
    model = MultitaskModel(encoder, tasks, settings)
    of_encoder = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    try:
        model.load_state_dict(of_encoder | heads)
    except RuntimeError as error:
        raise ModelError(
            f"{directory}: heads.safetensors must fit hpo.json: {shorten(str(error), 400)}"
        ) from error
    tokenizer = load_tokenizer(str(directory), trust_remote_code=trust_remote_code)
    return model.eval(), tokenizer, metadata
