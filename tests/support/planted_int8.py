"""A study whose exports can be ruined for int8 on purpose, while they stay the same functions in fp32.

A channel of the attention's values is multiplied by 1e4, and its weights in the next layer, the
attention's output, by 1e-4. With one scale for all activations of that layer, int8 rounds every other channel
to zero.
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
"""Points, that the 40 rows of validation suffice for: on so few nothing less can be excluded."""


def write_mood_study(folder: Path, **changes: Any) -> Path:
    """Texts that are `good` or `bad` by one word, of which the first token learns by the attention alone."""
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
    """Plant the flaw in an exported model."""
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
    """A context in which every trial that is exported, as `module` sees it, has the flaw."""
    export: Callable[..., Path] = best_model.export_checkpoint
    return mock.patch(
        f"{module}.export_checkpoint", side_effect=lambda *args, **of: ruin(export(*args, **of))
    )
