"""A labelled example: one text with its truth for each task.

A task without a key in `labels` or `spans` is not annotated: the example has no part in its loss and metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Offsets = tuple[int, int]
"""First character of a span and its end, one past its last character."""
Label = str | list[str] | float


@dataclass(frozen=True, slots=True)
class Example:
    """One text with its truth.

    A span `(start, end)` is the characters `text[start:end]`. Spans are sorted. White space at their ends is
    removed, as it is from predictions.
    """

    id: str
    text: str
    labels: Mapping[str, Label]
    spans: Mapping[str, Sequence[Offsets]]
    segments: Mapping[str, Offsets] = field(default_factory=dict)
    alt_spans: Mapping[str, Sequence[Offsets]] = field(default_factory=dict)
    annotated: frozenset[str] = frozenset()
    """Names of the tasks with a truth in this row. `span_per_label` needs both its spans and the classes of
    the task that they are evidence for."""
    group: str | None = None
