"""The kind whose truth is evidence: spans for the classes that another task finds in a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpo.tasks.kind import indicators
from hpo.tasks.spans import SpanKind

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.data.examples import Example
    from hpo.data.tokenized_split import AnyArray, BoolArray, IntArray, TokenizedSplit
    from hpo.tasks.kind import RowLabels, RowSpans, Segments
    from hpo.training.losses import LossOptions


class SpanPerLabel(SpanKind):
    """A token is evidence for a class or is not, for each class by itself."""

    name = "span_per_label"
    losses = ("bce", "focal")
    min_labels = 1
    needed_key = "evidence_for"

    def span_problems(self, spans: RowSpans, labels: RowLabels, segments: Segments) -> list[str]:
        labelled = self.task.evidence_for
        if labelled is None or labelled not in labels:
            return []
        held = labels[labelled]
        classes = held if isinstance(held, list) else [held]
        return [
            f"spans.{name} is evidence for a class that labels.{labelled} does not name"
            for name in sorted({name for _, _, name in spans}.difference(map(str, classes)))
        ]

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray:
        """1 for the classes that hold and have evidence somewhere in the text: int8 [W, C]."""
        own = set(self.task.labels)
        held = [[name for name in example.spans if name in own] for example in examples]
        return indicators(self.task, held).astype(np.int8)

    def batch_target(self, split: TokenizedSplit, windows_B: IntArray, is_text_BL: BoolArray) -> AnyArray:
        inside, _ = split.spans[self.task.name].placed(windows_B)
        holds_BC = split.targets[self.task.name][windows_B] == 1
        evidence_BLC = np.zeros((*is_text_BL.shape, len(self.task.labels)), dtype=np.float32)
        evidence_BLC[inside] = 1.0
        known_BL = self._known(split, windows_B, is_text_BL)
        evidence_BLC[~(known_BL[:, :, None] & holds_BC[:, None, :])] = -1.0
        return evidence_BLC

    def initial_bias(self) -> list[float]:
        return [-math.log(9)] * self.num_outputs

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        from hpo.tasks.losses import binary_sum

        return binary_sum(logits, target, options.gamma, options.label_smoothing, weight)

    def class_weights(self, targets: Iterable[Tensor]) -> Tensor:
        from hpo.tasks.losses import binary_weights

        return binary_weights(targets, self.num_outputs)
