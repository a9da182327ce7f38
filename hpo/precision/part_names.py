"""The parts of a model that `precision_overrides` names.

    embeddings          what turns tokens into vectors
    encoder.layer.N     a layer of the encoder, 0 the lowest
    heads               the pooling and the head of every task

The model says how many layers there are (`hpo.models.model_parts`). This module does not import PyTorch.
"""

from __future__ import annotations

import re

from hpo.errors import did_you_mean

EMBEDDINGS, LAYER, HEADS = "embeddings", "encoder.layer.", "heads"


def check_part(name: str) -> None:
    """Raise ValueError with the nearest name where `name` can be no part of any model."""
    if name in (EMBEDDINGS, HEADS) or re.fullmatch(rf"{re.escape(LAYER)}\d+", name):
        return
    index = next(iter(re.findall(r"\d+", name)), "0")
    known = [EMBEDDINGS, f"{LAYER}{index}", HEADS]
    raise ValueError(f"there is no part {name!r} of a model.{did_you_mean(name, known)}")
