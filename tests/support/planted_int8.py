"""Study with a flaw for its exports: int8 ruins them, and fp32 computes the same as before.

A channel of the attention's values is multiplied by 1e4, and its weights in the next layer, the attention's
output, by 1e-4. With one scale for all activations, int8 rounds every other channel to zero.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load_file, save_file

from hpo.api import deploying
from support.jsonl_sets import write_moods
from support.tiny import ENCODER, write_study

OUTPUT = "encoder.layer.0.attention.output.dense"
VALUE = "encoder.layer.0.attention.self.value"
FACTOR = 1e4
MAX_DROP = 11.0
"""Smallest loss in points that the 40 rows of validation can exclude."""


def write_mood_study(folder: Path, **changes: Any) -> Path:
    """Write a study of texts with one word `good` or `bad`, which the first token sees by attention alone."""
    texts = ["a good day", "a bad day"]
    data = write_moods(folder / "data", train=texts * 32, validation=texts * 20, test=texts * 160)
    training = {"max_steps": 40, "batch_size": 16, "max_length": 16, "dropout": 0.0, "pooling": "cls"}
    study = {
        "name": "mood",
        "n_trials": 1,
        "objective": {"metric": "mood/accuracy"},
        "data": {"source": "jsonl", "path": str(data)},
        "model": {"encoder": ENCODER | {"num_hidden_layers": 1}},
        "training": {**training, "learning_rate": 3e-3},
        "amp": {"preset": "basic"},
        "search_space": {},
    }
    return write_study(folder, **study | changes)


def ruin(exported: Path) -> Path:
    """Plant the flaw in an exported model, and return its folder."""
    file = exported / "model.safetensors"
    weights = load_file(file)
    weights[f"{VALUE}.weight"][0] *= FACTOR
    weights[f"{VALUE}.bias"][0] *= FACTOR
    weights[f"{OUTPUT}.weight"][:, 0] /= FACTOR
    save_file(weights, file, metadata={"format": "pt"})
    content = json.loads((exported / "hpo.json").read_text())
    content.pop("checksums", None)
    (exported / "hpo.json").write_text(json.dumps(content))
    return exported


def ruined_exports() -> Any:
    """Plant the flaw in every deployment's export inside the block."""
    export = deploying.export_checkpoint
    return mock.patch.object(deploying, "export_checkpoint", lambda *args, **of: ruin(export(*args, **of)))
