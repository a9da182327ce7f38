"""The parts of a model that `precision_overrides` names.

    embeddings          what turns tokens into vectors
    encoder.layer.N     a layer of the encoder, 0 the lowest; `first` and `last` stand for their numbers
    attention           the attention of every layer
    heads, heads.TASK   the pooling and the head of every task; the head of one
    loss                what comes after the logits

Which tasks there are knows the data, and how many layers the model (`hpo.models.model_parts`).

This module knows no PyTorch.
"""

from __future__ import annotations

import re

from hpo.errors import did_you_mean

EMBEDDINGS, ATTENTION, HEADS, LOSS = "embeddings", "attention", "heads", "loss"
LAYER, HEAD = "encoder.layer.", "heads."
FIRST, LAST = "first", "last"


def check_part(name: str) -> None:
    """Raise ValueError with the nearest name where `name` can be no part of any model."""
    if name in (EMBEDDINGS, ATTENTION, HEADS, LOSS) or (name.startswith(HEAD) and name != HEAD):
        return
    if re.fullmatch(rf"{re.escape(LAYER)}(\d+|{FIRST}|{LAST})", name):
        return
    index = next(iter(re.findall(r"\d+", name)), "0")
    known = [EMBEDDINGS, ATTENTION, HEADS, LOSS, f"{HEAD}<task>"]
    known += [f"{LAYER}{layer}" for layer in (index, FIRST, LAST)]
    raise ValueError(f"there is no part {name!r} of a model.{did_you_mean(name, known)}")


def task_of(part: str) -> str | None:
    """The task of `heads.TASK`; None of any other part."""
    return part.removeprefix(HEAD) if part.startswith(HEAD) else None
