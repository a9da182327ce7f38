"""The kind whose truth is spans of several names, found by tags of tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hpo.tasks.kind import IGNORE_INDEX
from hpo.tasks.spans import SpanKind

if TYPE_CHECKING:
    from hpo.data.tokenized_split import AnyArray, BoolArray, IntArray, TokenizedSplit
    from hpo.tasks.kind import RowLabels, RowSpans, Segments


class TokenClassification(SpanKind):
    """Tags O, B-1, I-1, B-2, ... jointly, or (O, B, I) for each name when spans may overlap."""

    name = "token_classification"
    losses = ("cross_entropy", "focal")
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
