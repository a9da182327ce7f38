"""Exports of tiny models for PyTorch and ONNX, and their inputs and outputs."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hpo
from hpo.deploy.onnx_fp32 import export_onnx
from hpo.inference.model import TrainedModel
from hpo.models.encoder import load_tokenizer
from hpo.models.export import ExportSettings, export_model
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import Windowing
from support.tiny_encoders import FAMILIES, KIND_TASKS, family_model

TEXTS = (
    "Late again!",
    "Ann paid too much for the parcel, which came broken.",
    "late again in Rome and Ann paid too much " * 12,
)


def write_both(folder: Path, family: str = "bert", **heads: Any) -> tuple[TrainedModel, TrainedModel]:
    """Export a fresh model with a task of every kind for PyTorch (`folder`/torch) and onnxruntime
    (`folder`/onnx), and load both."""
    settings = ExportSettings(
        windowing=Windowing(32, "window", 8),
        attention=FAMILIES[family][1],
        precision="fp32",
        decisions={task.name: vars(DecodingThresholds(threshold=0.45)) for task in KIND_TASKS},
        provenance={"study": "complaints", "trial": 7, "scores": {"test": {"single": {"f1_macro": 0.5}}}},
    )
    fresh = family_model(family, tasks=KIND_TASKS, max_length=32, **heads)
    with torch.no_grad():  # larger logits
        for weight in fresh.heads.parameters():
            weight.normal_(std=0.5)
    model = hpo.load(export_model(fresh, load_tokenizer("minilm"), folder / "torch", settings), device="cpu")
    return model, hpo.load(export_onnx(model, folder / "onnx"), device="cpu")


def export_or_copy(folder: Path) -> Callable[[TrainedModel, Path], Path]:
    """Return a stand-in for `export_onnx` with a cache in `folder`."""

    def export(model: TrainedModel, directory: Path) -> Path:
        weights = (tensor.numpy().tobytes() for tensor in model.network.state_dict().values())
        key = hashlib.sha256(b"".join(weights) + repr((model.settings, model.tasks)).encode()).hexdigest()
        if not (folder / key).exists():
            export_onnx(model, folder / key)
        return Path(shutil.copytree(folder / key, directory))

    return export


def random_batch(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and segments of windows of these lengths."""
    generator = torch.Generator().manual_seed(len(lengths))
    mask_BL = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids_BL = torch.randint(30_000, mask_BL.shape, generator=generator) * mask_BL
    return ids_BL, mask_BL, torch.randint(2, mask_BL.shape, generator=generator) * mask_BL


def probabilities(model: TrainedModel, texts: tuple[str, ...] = TEXTS) -> Any:
    """Predict the probabilities [texts, classes of all tasks]."""
    predictions = model.predict(list(texts))
    return np.array([[p for task in one.values() for p in task.scores.values()] for one in predictions])
