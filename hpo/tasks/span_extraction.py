"""The kind whose truth is one span of a row, or none: an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpo.tasks.spans import SpanKind

if TYPE_CHECKING:
    from hpo.config.data_config import TaskConfig


class SpanExtraction(SpanKind):
    """Logits of the answer's first token and of its last one; the first token of all is that of no answer."""

    name = "span_extraction"
    metrics = ("span_f1", "span_overlap_f1", "exact_match")
    # Not focal: its classes are positions, and the imbalance that focal is for does not exist between them.
    losses = ("cross_entropy",)
    needed_key = "span_names"

    @classmethod
    def problems(cls, config: TaskConfig) -> Iterator[tuple[str, str]]:
        yield from super().problems(config)
        if len(config.span_names or ()) > 1:
            yield "kind", f"{cls.name} finds one span of one name. Use token_classification for several."

    @property
    def num_outputs(self) -> int:
        return 2
