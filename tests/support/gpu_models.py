"""Configurations of fresh BERTs, and their tokenizer, for a machine without a network.

A GPU machine may have neither the package with MiniLM nor a hub. The weights are random, which changes no
speed. The tokenizer was trained on generated posts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[1] / "gpu" / "tokenizer"

# (hidden size, layers, heads, intermediate size); `base` and `large` as published (arXiv 1810.04805)
SIZES = {
    "tiny": (32, 2, 2, 64),
    "small": (256, 2, 4, 1024),
    "wide": (1024, 2, 16, 4096),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
}
_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def fresh_encoder(size: str) -> dict[str, Any]:
    """Return the `model.encoder` of a study with a fresh BERT."""
    return {
        "model_type": "bert",
        "tokenizer": str(TOKENIZER),
        "max_position_embeddings": 512,
        **({"vocab_size": 30522} if size in ("base", "large") else {}),
        **dict(zip(_NAMES, SIZES[size], strict=True)),
    }
