"""What my study adds to hpo: `code: my_tasks.py` in study.yaml has this file run first.

What is named here is used by its name in study.yaml. Options of a `hpo.Section` are settings: `gated.width` is
fixed under `training` or searched under `search_space`. Take out what you do not need.

The hash of this file is part of the study: to go on with other code, give the study another name. A worker
that has only the study's name needs `--trust-code my_tasks.py`, and `hpo.load` needs `code="my_tasks.py"`.
"""

import itertools
import random

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpo


# A head: from states [..., hidden_size] to logits [..., num_outputs]. `head_type: gated`, or of one task
# `head_type.mood: gated`.
class Gated(hpo.Section):
    width: int = 64


@hpo.head("gated", Gated)
def gated(hidden_size, num_outputs, options):
    inner = nn.Linear(hidden_size, 2 * options.width)
    return nn.Sequential(inner, nn.GLU(), nn.Linear(options.width, num_outputs))


# A loss: the sum over the rows; a row without a label has the target -100. `loss: poly1` (arXiv 2204.12511).
class Poly1(hpo.Section):
    epsilon: float = 1.0


@hpo.loss("poly1", ["single_label"], Poly1)
def poly1(kind, logits, target, options, class_weight, mask):
    ce = cross_entropy(logits, target, class_weight, reduction="none", ignore_index=-100)
    return (ce + options.epsilon * (1 - torch.exp(-ce))).sum()


# A metric, of one truth and one prediction a row: `mood/kappa` as objective or limit, or `primary_metric: kappa`.
# This one is Cohen's kappa. NaN says that it has no value for these rows.
@hpo.metric("kappa", ["single_label"])
def kappa(truths, predictions):
    truths, predictions = np.array(truths), np.array(predictions)
    by_chance = sum((truths == mood).mean() * (predictions == mood).mean() for mood in {*truths})
    return ((truths == predictions).mean() - by_chance) / (1 - by_chance) if by_chance < 1 else float("nan")


# A source of data: the rows of a split, as a line of a jsonl file has them. `source: posts`. No text is in two
# splits: a model that has seen the texts of validation would score too well there.
class Posts(hpo.Section):
    size: int = 120  # rows to train on, at most 150; validation and test have half as many each


@hpo.source("posts", Posts)
def posts(split, options):
    moods = {"angry": "late broken rude lost dirty", "pleased": "quick kind neat cheap friendly"}
    things, days = ["parcel", "driver", "shop", "box", "offer", "reply"], ["today", "again", "at last", "once", "now"]
    words = [(word, mood) for mood, of_mood in moods.items() for word in of_mood.split()]
    rows = list(itertools.product(things, words, days))
    random.Random(0).shuffle(rows)
    half = options.size // 2
    first, number = {"train": (0, 2 * half), "validation": (2 * half, half), "test": (3 * half, half)}[split]
    for thing, (word, mood), day in rows[first : first + number]:
        yield {"id": f"{thing}-{word}-{day}", "text": f"The {thing} was {word} {day}.", "labels": {"mood": mood}}


# An encoder, with `model: {encoder: bag}`: any module of input_ids and attention_mask [B, L] that returns states
# [B, L, D]. Its tokens are those of MiniLM, or `@hpo.encoder("bag", tokenizer="org/name")`.
#
# class Bag(nn.Module):
#     def __init__(self):
#         super().__init__()
#         self.embed = nn.Embedding(30522, 64)
#
#     def forward(self, input_ids, attention_mask):
#         return self.embed(input_ids) * attention_mask[..., None]
#
#
# @hpo.encoder("bag")
# def bag(options):
#     return Bag()
#
# A pooling (`@hpo.pooling`), an optimiser (`@hpo.optimizer`), a schedule (`@hpo.schedule`) and a kind of task
# (`@hpo.kind`) come in the same way: hpo/extensions.py says with what they are called.
