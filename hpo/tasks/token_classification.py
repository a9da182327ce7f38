"""The kind with spans of several names, as tags of tokens."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from hpo.tasks.kind import IGNORE_INDEX, FloatArray, Predicted, RowLabels, RowSpans, Segments
from hpo.tasks.losses import Multiclass
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.spans import SpanKind, character_spans, runs_of, text_tokens
from hpo.tasks.tokenized_split import AnyArray, BoolArray, IntArray, TokenizedSplit


class TokenClassification(SpanKind, Multiclass):
    """Tags O, B-1, I-1, B-2, ... jointly, or (O, B, I) for each name when spans may overlap."""

    name = "token_classification"
    needed_key = "span_names"

    @property
    def num_outputs(self) -> int:
        num_names = len(self.task.labels)
        return 3 * num_names if self.task.spans_may_overlap else 2 * num_names + 1

    def span_problems(self, spans: RowSpans, labels: RowLabels, segments: Segments) -> list[str]:
        if self.task.spans_may_overlap:
            return []
        return [
            f"spans.{name} [{a}, {b}] and spans.{other} [{c}, {d}] overlap, but `{self.task.name}` "
            "has spans_may_overlap: false"
            for (a, b, name), (c, d, other) in pairwise(spans)
            if c < b
        ]

    def batch_target(self, split: TokenizedSplit, windows_B: IntArray, is_text_BL: BoolArray) -> AnyArray:
        inside, first = split.spans[self.task.name].placed(windows_B)
        if self.task.spans_may_overlap:
            tags = np.zeros((*is_text_BL.shape, len(self.task.labels)), dtype=np.int64)
            tags[inside], tags[first] = 2, 1
        else:
            tags = np.zeros(is_text_BL.shape, dtype=np.int64)
            tags[inside[:2]] = 2 * inside[2] + 2
            tags[first[:2]] = 2 * first[2] + 1
        tags[~self._known(split, windows_B, is_text_BL)] = IGNORE_INDEX
        return tags

    def initial_bias(self) -> list[float]:
        num_names = len(self.task.labels)
        inside = 1 / 4 / num_names if self.task.spans_may_overlap else 1 / 4
        num_tags = 2 if self.task.spans_may_overlap else 2 * num_names
        group = [math.log((1 - inside) / (inside / num_tags)), *[0.0] * num_tags]
        return group * (self.num_outputs // len(group))

    @property
    def num_choices(self) -> int:
        """Number of tags: O, B and I of each name if spans may overlap."""
        return 3 if self.task.spans_may_overlap else self.num_outputs

    def labelled(self, target: Tensor) -> Tensor:
        return (target >= 0).any(dim=-1) if self.task.spans_may_overlap else target >= 0

    def decode(
        self, logits: FloatArray, split: TokenizedSplit, decision: DecodingThresholds, labels: Predicted
    ) -> list[Any]:
        """Decode tags: B begins a span, I continues a span of its name, or else begins one.

        If spans may overlap, each name has its own tags.
        """
        token_O, example_O, begins_O = text_tokens(split)
        num_names = len(self.task.labels)
        if self.task.spans_may_overlap:
            tag_NO = logits[token_O].reshape(-1, num_names, 3).argmax(axis=2).T
            name_NO = np.where(tag_NO > 0, np.arange(num_names)[:, None], -1)
            is_b_NO = tag_NO == 1
        else:
            tag_NO = logits[token_O].argmax(axis=1)[None]
            name_NO = (tag_NO - 1) // 2
            is_b_NO = tag_NO % 2 == 1
        name_P = name_NO.ravel()
        changes_P = np.ones(len(name_P), bool)
        changes_P[1:] = name_P[1:] != name_P[:-1]
        first, last = runs_of(name_P >= 0, is_b_NO.ravel() | changes_P | np.tile(begins_O, len(tag_NO)))
        names = [self.task.labels[n] for n in name_P[first]]
        first_O, last_O = first % len(token_O), last % len(token_O)
        return character_spans(split, example_O[first_O], names, token_O[first_O], token_O[last_O])
