"""Studies for the checks of `tests/gpu`: fresh encoders of known sizes, and texts of known lengths.

Nothing here needs a network or the weights of MiniLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpo.data.synthetic import TASKS_JSON, SyntheticRows
from hpo.device import DeviceInfo
from support.gpu_models import fresh_encoder
from support.jsonl_sets import write_set
from support.tiny import write_study

# Adam and clipping hide a wrong scale of the gradients. Here it changes the losses.
SGD = {"optimizer": "sgd", "learning_rate": 0.005, "max_grad_norm": 1000.0}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
TASKS = ("criteria", "severity")


def write_texts(folder: Path, num_train: int, sentences: tuple[int, int], num_validation: int = 16) -> Path:
    """A set with a multi-label and a single-label task, each labelled in every row."""
    splits = {}
    for split, size in (("train", num_train), ("validation", num_validation)):
        posts = SyntheticRows(split, size, min_sentences=sentences[0], max_sentences=sentences[1])
        splits[split] = [
            {"id": post.id, "text": post.text, "labels": {name: post.labels[name] for name in TASKS}}
            for post in posts
        ]
    specs = TASKS_JSON["tasks"]
    return write_set(folder, {"tasks": {name: specs[name] for name in TASKS}}, **splits)


def write_gpu_study(
    folder: Path,
    device: DeviceInfo,
    size: str,
    *,
    texts: tuple[int, tuple[int, int]] = (64, (2, 6)),
    training: dict[str, Any],
    **changes: Any,
) -> Path:
    """A study on `device` of an encoder of this size; `texts` are (number of rows, sentences of a row)."""
    num_train, sentences = texts
    data = write_texts(folder / "texts", num_train, sentences)
    # A CPU may lack the instructions for bf16. A GPU must have them.
    amp = {"allow_emulated": device.type == "cpu"} | changes.pop("amp", {})
    defaults = {"batch_size": 16, "max_length": 64, "schedule": "constant", "warmup_ratio": 0.0, **NO_DROPOUT}
    return write_study(
        folder,
        device=device.type,
        data={"source": "jsonl", "path": str(data)},
        model={"encoder": fresh_encoder(size)},
        training=defaults | training,
        amp=amp,
        **changes,
    )


def relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def largest_relative(values: Sequence[float], references: Sequence[float]) -> float:
    """The largest relative difference of two lists."""
    return max(map(relative, values, references))
