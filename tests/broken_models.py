"""Models of the tiny study that break on purpose in one part, in fp16 or in bf16, and are sound in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import altered_executor
from torch import nn

from hpo.models.encoder import encoder_layers
from hpo.models.multitask import MultitaskModel
from hpo.trial.executor import Executor

TRAINING = {"max_steps": 6, "batch_size": 8, "max_length": 64, "dropout": 0.0, "attention": "eager"}

Alter = Callable[[MultitaskModel], object]


def altered(folder: Path, alter: Alter = lambda _: None, **study: Any) -> Executor:
    return altered_executor(folder, alter, **{"training": TRAINING, **study})


def wide_layer(model: MultitaskModel, layer: int = 1) -> None:
    """A feed-forward output beyond fp16's largest number, which the norm after it takes back."""
    block: Any = encoder_layers(model.encoder)[layer]
    nn.init.constant_(block.intermediate.dense.bias, 10.0)
    nn.init.normal_(block.output.dense.weight, std=1e4)
