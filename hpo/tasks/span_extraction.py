"""The kind whose truth is one span of a row, or none: an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hpo.tasks.kind import IGNORE_INDEX
from hpo.tasks.spans import SpanKind

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.config.data_config import TaskConfig
    from hpo.data.tokenized_split import AnyArray, BoolArray, WindowSpans
    from hpo.tasks.kind import RowLabels, RowSpans, Segments
    from hpo.training.losses import LossOptions


class SpanExtraction(SpanKind):
    """Logits of the answer's first token and of its last one; the first token of all is that of no answer."""

    name = "span_extraction"
    metrics = ("span_f1", "span_overlap_f1", "exact_match")
    # Not focal: its classes are positions, and the imbalance that focal is for does not exist between them.
    losses = ("cross_entropy",)
    needed_key = "span_names"
    at_first_token = "no answer"

    @classmethod
    def problems(cls, config: TaskConfig) -> Iterator[tuple[str, str]]:
        yield from super().problems(config)
        if len(config.span_names or ()) > 1:
            yield "kind", f"{cls.name} finds one span of one name. Use token_classification for several."

    @property
    def num_outputs(self) -> int:
        return 2

    def span_problems(self, spans: RowSpans, labels: RowLabels, segments: Segments) -> list[str]:
        name, segment = self.task.name, self.task.inside_segment
        problems = [f"`{name}` takes one span a row, but got {len(spans)}"] if len(spans) > 1 else []
        if segment is not None:
            low, high = segments.get(segment, (0, 0))
            problems += [
                f"spans.{name}: [{start}, {end}] must lie inside segment `{segment}` [{low}, {high}]"
                for start, end, name in spans
                if not low <= start < end <= high
            ]
        return problems

    def window_targets(self, spans: WindowSpans, annotated_W: BoolArray) -> AnyArray:
        """First and last token of the answer that a window holds whole, else (0, 0): no answer."""
        target_W2 = np.zeros((len(annotated_W), 2), dtype=np.int32)
        window_S = np.repeat(np.arange(len(annotated_W)), np.diff(spans.start_W1))
        is_whole_S = spans.rows_S4[:, 3] == 0
        target_W2[window_S[is_whole_S]] = spans.rows_S4[is_whole_S, 1:3]
        target_W2[~annotated_W] = IGNORE_INDEX
        return target_W2

    def labelled(self, target: Tensor) -> Tensor:
        return (target >= 0).any(dim=-1)

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        from hpo.tasks.losses import position_sum

        return position_sum(logits, target, mask_BL != 0, options.label_smoothing)
