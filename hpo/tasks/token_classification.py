"""The kind whose truth is spans of several names, found by tags of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hpo.tasks.kind import IGNORE_INDEX
from hpo.tasks.spans import SpanKind

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.data.tokenized_split import AnyArray, BoolArray, IntArray, TokenizedSplit
    from hpo.tasks.kind import RowLabels, RowSpans, Segments
    from hpo.training.losses import LossOptions


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

    def initial_bias(self) -> list[float]:
        num_names = len(self.task.labels)
        inside = 1 / 4 / num_names if self.task.spans_may_overlap else 1 / 4
        num_tags = 2 if self.task.spans_may_overlap else 2 * num_names
        of_group = [math.log((1 - inside) / (inside / num_tags)), *[0.0] * num_tags]
        return of_group * (self.num_outputs // len(of_group))

    @property
    def _num_tags(self) -> int:
        """Of one choice, O included."""
        return 3 if self.task.spans_may_overlap else self.num_outputs

    def labelled(self, target: Tensor) -> Tensor:
        return (target >= 0).any(dim=-1) if self.task.spans_may_overlap else target >= 0

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        from hpo.tasks.losses import multiclass_sum

        logits_NK, target_N = logits.reshape(-1, self._num_tags), target.reshape(-1)
        return multiclass_sum(logits_NK, target_N, options.gamma, options.label_smoothing, weight)

    def class_weights(self, targets: Iterable[Tensor]) -> Tensor:
        """Of O, B and I over all names when spans may overlap."""
        from hpo.tasks.losses import multiclass_weights

        return multiclass_weights(targets, self._num_tags)
