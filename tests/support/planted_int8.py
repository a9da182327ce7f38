"""Study with a flaw for its exports: int8 ruins them, and fp32 computes the same as before.

A channel of the attention's values is multiplied by 1e4, and its weights in the next layer, the attention's
output, by 1e-4. With one scale for all activations, int8 rounds every other channel to zero.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load_file, save_file

from hpo.trial import best_model
from support.jsonl_sets import write_set
from support.tiny import ENCODER, write_study

OUTPUT = "encoder.encoder.layer.0.attention.output.dense"
VALUE = "encoder.encoder.layer.0.attention.self.value"
FACTOR = 1e4
MAX_DROP = 11.0
"""Smallest loss in points that the 40 rows of validation can exclude."""


def write_mood_study(folder: Path, **changes: Any) -> Path:
    """Write a study of texts with one word `good` or `bad`, which the first token sees by attention alone."""
    numbers = itertools.count()

    def rows(num: int) -> Iterator[dict[str, Any]]:
        for index in range(num):
            label = ("good", "bad")[index % 2]
            yield {"id": str(next(numbers)), "text": f"a {label} day", "labels": {"mood": label}}

    tasks = {"mood": {"kind": "single_label", "classes": ["good", "bad"]}}
    data = write_set(folder / "data", tasks, train=rows(64), validation=rows(40), test=rows(320))
    training = {"max_steps": 40, "batch_size": 16, "max_length": 16, "dropout": 0.0, "pooling": "cls"}
    study = {
        "name": "mood",
        "n_trials": 1,
        "objective": {"metric": "mood/accuracy", "direction": "maximize"},
        "data": {"source": "jsonl", "path": str(data)},
        "model": {"encoder": ENCODER | {"num_hidden_layers": 1}},
        "training": {**training, "learning_rate": 3e-3},
        "amp": {"preset": "basic"},
        "search_space": {},
        "sampler": {"name": "random", "seed": 1},
    }
    return write_study(folder, **study | changes)


def ruin(exported: Path) -> Path:
    """Plant the flaw in an exported model, and return its folder."""
    file = exported / "model.safetensors"
    weights = load_file(file)
    value, output = (name.removeprefix("encoder.") for name in (VALUE, OUTPUT))
    weights[f"{value}.weight"][0] *= FACTOR
    weights[f"{value}.bias"][0] *= FACTOR
    weights[f"{output}.weight"][:, 0] /= FACTOR
    save_file(weights, file, metadata={"format": "pt"})
    content = json.loads((exported / "hpo.json").read_text())
    content.pop("checksums", None)
    (exported / "hpo.json").write_text(json.dumps(content))
    return exported


def ruined_exports(module: str = "hpo.trial.best_model") -> Any:
    """Plant the flaw in every export by `module` inside the block."""
    export: Callable[..., Path] = best_model.export_checkpoint
    return mock.patch(
        f"{module}.export_checkpoint", side_effect=lambda *args, **of: ruin(export(*args, **of))
    )
