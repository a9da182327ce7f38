"""Encoders of two layers and 32 dimensions, one for each architecture in the tests."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpo.models.encoder import load_encoder, load_tokenizer
from hpo.models.multitask import HeadSettings, MultitaskModel, build_model
from hpo.tasks.kind import Task
from support.tiny import ENCODER, SIZES

LABEL = Task("label", "single_label", ("a", "b", "c"))
SPANS = Task("spans", "token_classification", ("x", "y"))
TASKS = (LABEL, SPANS)
KIND_TASKS = (  # one of every kind
    Task("single", "single_label", ("a", "b", "c")),
    Task("multi", "multi_label", ("a", "b")),
    Task("number", "regression"),
    Task("joint", "token_classification", ("x", "y")),
    Task("overlapping", "token_classification", ("x", "y"), spans_may_overlap=True),
    Task("answer", "span_extraction", ("answer",)),
    Task("evidence", "span_per_label", ("a", "b"), evidence_for="multi"),
)

BERT = ENCODER | {"max_position_embeddings": 64}
DISTILBERT = {"model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
RELATIVE = {"relative_attention": True, "position_biased_input": False, "max_relative_positions": 64}

# name -> (configuration, attention): DeBERTa and MPNet have no sdpa.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "bert": (BERT, "sdpa"),
    "roberta": ({**BERT, "model_type": "roberta", "type_vocab_size": 1}, "sdpa"),
    "distilbert": ({**DISTILBERT, "max_position_embeddings": 64}, "sdpa"),
    "modernbert": ({**BERT, "model_type": "modernbert"}, "sdpa"),
    "deberta-v2": ({**BERT, "model_type": "deberta-v2", **RELATIVE, "pos_att_type": ["p2c", "c2p"]}, "eager"),
    "mpnet": ({**BERT, "model_type": "mpnet"}, "eager"),
    "electra": ({**BERT, "model_type": "electra", "embedding_size": 16}, "sdpa"),
}
DECODER_SIZES = {"hidden_size": 32, **SIZES, "num_key_value_heads": 1, "max_position_embeddings": 64}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **DECODER_SIZES},
    "qwen3": {"model_type": "qwen3", **DECODER_SIZES, "head_dim": 16},
    "smollm3": {"model_type": "smollm3", **DECODER_SIZES},
    "gemma3": {"model_type": "gemma3_text", **DECODER_SIZES, "head_dim": 16, "sliding_window": 8},
}
MODEL_SETTINGS = ("max_length", "freeze_layers", "gradient_checkpointing")


def family_encoder(family: str, **settings: Any) -> nn.Module:
    config, attention = FAMILIES[family]
    return load_encoder(config, attention=attention, **settings)


def save_encoder(folder: Path) -> Path:
    """Save an encoder: config, weights of seed 0, tokenizer."""
    torch.manual_seed(0)
    encoder: Any = load_encoder(BERT)
    encoder.save_pretrained(folder)
    load_tokenizer(BERT).save_pretrained(folder)
    return folder


def make_model(encoder: str | dict[str, Any] = BERT, *, seed: int = 0, **settings: Any) -> MultitaskModel:
    """Build a model with two tasks and short texts. `settings` are those of a study file."""
    torch.manual_seed(seed)
    tasks = settings.pop("tasks", TASKS)
    settings = {"max_length": 16, **settings}
    heads = {field.name: settings.pop(field.name) for field in fields(HeadSettings) if field.name in settings}
    own = {name: settings.pop(name) for name in MODEL_SETTINGS if name in settings}
    return build_model(load_encoder(encoder, **settings), tasks, HeadSettings(**heads), **own)


def family_model(family: str, **settings: Any) -> MultitaskModel:
    config, attention = FAMILIES[family]
    return make_model(config, attention=attention, **settings)


def make_batch(lengths: tuple[int, ...] = (12, 7)) -> tuple[Tensor, Tensor]:
    """Return random token ids and the attention mask, both [B, L], padded with minilm's id 0."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1000, 20000, mask.shape, generator=generator) * mask, mask


def scalar_loss(model: MultitaskModel, lengths: tuple[int, ...] = (12, 7)) -> Tensor:
    """Compute a loss that depends on every parameter."""
    torch.manual_seed(0)
    return torch.stack([logits.square().mean() for logits in model(*make_batch(lengths)).values()]).sum()


def copy_export(export: Path, folder: Path, **changes: Any) -> Path:
    """Copy an export to `folder`/copy, with changes of its hpo.json."""
    out = Path(shutil.copytree(export, folder / "copy"))
    content = json.loads((out / "hpo.json").read_text())
    (out / "hpo.json").write_text(json.dumps(content | changes))
    return out


def dropout_rates(model: nn.Module) -> dict[str, float]:
    return {name: part.p for name, part in model.named_modules() if isinstance(part, nn.Dropout)}
