"""Encoders of two layers and 32 dimensions, one for each architecture that the tests cover."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hpo.data.tasks import Task
from hpo.models.encoder import load_encoder
from hpo.models.multitask import HeadSettings, MultitaskModel, build_model

LABEL = Task("label", "single_label", ("a", "b", "c"))
SPANS = Task("spans", "token_classification", ("x", "y"))
TASKS = (LABEL, SPANS)

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BERT: dict[str, Any] = {"model_type": "bert", "hidden_size": 32, **SIZES, "max_position_embeddings": 64}

# name -> (configuration, attention): DeBERTa and MPNet have no sdpa.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "bert": (BERT, "sdpa"),
    "roberta": ({**BERT, "model_type": "roberta"}, "sdpa"),
    "distilbert": (
        {
            "model_type": "distilbert",
            "dim": 32,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 64,
            "max_position_embeddings": 64,
        },
        "sdpa",
    ),
    "modernbert": ({**BERT, "model_type": "modernbert"}, "sdpa"),
    "deberta-v2": (
        {
            **BERT,
            "model_type": "deberta-v2",
            "relative_attention": True,
            "position_biased_input": False,
            "pos_att_type": ["p2c", "c2p"],
            "max_relative_positions": 64,
        },
        "eager",
    ),
    "mpnet": ({**BERT, "model_type": "mpnet"}, "eager"),
    "electra": ({**BERT, "model_type": "electra", "embedding_size": 16}, "sdpa"),
}
MODEL_SETTINGS = ("max_length", "freeze_layers", "gradient_checkpointing")


def make_model(encoder: str | dict[str, Any] = BERT, *, seed: int = 0, **settings: Any) -> MultitaskModel:
    """A model with a seed, two tasks and short texts, unless `settings` of a study file say otherwise."""
    torch.manual_seed(seed)
    tasks = settings.pop("tasks", TASKS)
    settings = {"max_length": 16, **settings}
    heads = {field.name: settings.pop(field.name) for field in fields(HeadSettings) if field.name in settings}
    own = {name: settings.pop(name) for name in MODEL_SETTINGS if name in settings}
    return build_model(load_encoder(encoder, **settings), tasks, HeadSettings(**heads), **own)


def make_batch(
    lengths: tuple[int, ...] = (12, 7), padded_to: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random token ids and the attention mask, both [B, L]; padded with id 0, minilm's."""
    generator = torch.Generator().manual_seed(seed)
    width = padded_to or max(lengths)
    input_ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, :length] = torch.randint(1000, 20000, (length,), generator=generator)
        mask[row, :length] = 1
    return input_ids, mask


def scalar_loss(model: MultitaskModel, seed: int = 0) -> Tensor:
    """A loss that every parameter has a part in."""
    torch.manual_seed(seed)
    return torch.stack([logits.square().mean() for logits in model(*make_batch()).values()]).sum()
