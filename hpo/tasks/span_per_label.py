"""The kind whose truth is evidence: spans for the classes that another task finds in a row."""

from __future__ import annotations

from hpo.tasks.spans import SpanKind


class SpanPerLabel(SpanKind):
    """A token is evidence for a class or is not, for each class by itself."""

    name = "span_per_label"
    losses = ("bce", "focal")
    min_labels = 1
    needed_key = "evidence_for"
