"""What the kinds have in common whose truth is spans of characters: (name, start, end), end exclusive."""

from __future__ import annotations

from hpo.tasks.kind import Kind


class SpanKind(Kind):
    """A kind whose truth is spans."""

    metrics = ("span_f1", "span_overlap_f1", "f1_macro")
    level = "token"
    in_spans = True

    @property
    def num_outputs(self) -> int:
        return len(self.task.labels)
