"""The kind whose truth is spans of several names, found by tags of tokens."""

from __future__ import annotations

from hpo.tasks.spans import SpanKind


class TokenClassification(SpanKind):
    """Tags O, B-1, I-1, B-2, ... jointly, or (O, B, I) for each name when spans may overlap."""

    name = "token_classification"
    losses = ("cross_entropy", "focal")
    needed_key = "span_names"

    @property
    def num_outputs(self) -> int:
        num_names = len(self.task.labels)
        return 3 * num_names if self.task.spans_may_overlap else 2 * num_names + 1
