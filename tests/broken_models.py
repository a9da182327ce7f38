"""Models of the tiny study that break on purpose in one part, in fp16 or in bf16, and are sound in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import altered_executor
from torch import Tensor, nn

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


def wide_head(model: MultitaskModel, task: str = "severity") -> None:
    """Logits beyond fp16's largest number; those of all classes, so the softmax is what it was."""
    head: Any = model.heads[[one.name for one in model.tasks].index(task)]
    nn.init.constant_(head[-1].bias, 1e5)


class Cancelling(nn.Module):
    """A sum of numbers that all but cancel: bf16's eight bits leave nothing of what fp32 keeps."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, hidden: Tensor) -> Tensor:
        offset = 300.0 * torch.eye(hidden.shape[-1], self.dense.out_features, dtype=torch.float32)
        product = hidden @ offset + 300.0
        return self.dense(hidden) + (
            product.to(hidden.dtype) - 300.0 - 300.0 * hidden[..., : product.shape[-1]]
        )


def cancelling_layer(model: MultitaskModel, layer: int = 0) -> None:
    block: Any = encoder_layers(model.encoder)[layer]
    block.attention.output.dense = Cancelling(block.attention.output.dense)
