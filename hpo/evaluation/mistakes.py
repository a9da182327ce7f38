"""The wrong rows of a model, the worst first.

The loss of a row is -log of the probability of the true class (single_label), the sum of the classes' binary
cross-entropies (multi_label), the absolute error (regression), or the number of missed and spurious spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.evaluation.record import Mistake
from hpo.tasks.example import Example
from hpo.tasks.kind import Kind, Span, Task, kind_of
from hpo.tasks.spans import SpanKind

MAX_MISTAKES = 20
MAX_CHARACTERS = 1000
_BEFORE = 200
"""Characters of a long text before its first wrong span."""


def worst_mistakes(
    task: Task,
    predicted: Sequence[Any],
    examples: Sequence[Example],
    probabilities_NC: NDArray[np.float64] | None,
    limit: int = MAX_MISTAKES,
) -> tuple[Mistake, ...]:
    """Return at most `limit` wrong rows of the labelled `examples`; of equal loss, the earlier one first.

    `probabilities_NC` are those of single_label and multi_label.
    """
    kind = kind_of(task)
    loss_N = kind.row_losses(predicted, examples, probabilities_NC) if examples else np.zeros(0)
    order = np.argsort(-loss_N, kind="stable")
    wrong = [n for n in order[np.isfinite(loss_N[order])].tolist() if loss_N[n] > 0]
    return tuple(_mistake(kind, predicted[n], examples[n], float(loss_N[n])) for n in wrong[:limit])


def _mistake(kind: Kind, predicted: Any, example: Example, loss: float) -> Mistake:
    if not isinstance(kind, SpanKind):
        truth: Any = example.labels[kind.task.name]
        if kind.is_list:  # both in the order of the task's classes
            truth, predicted = ([c for c in kind.task.labels if c in names] for names in (truth, predicted))
        return Mistake(example.id, example.text[:MAX_CHARACTERS], truth, predicted, loss)
    spans = [kind.shown_spans(example), set(predicted)]
    wrong, first = spans[0] ^ spans[1], 0
    if max(end for group in spans for _, _, end in group) > MAX_CHARACTERS:
        first_wrong = min(start for _, start, _ in wrong)
        first = max(0, min(first_wrong - _BEFORE, len(example.text) - MAX_CHARACTERS))
    text = example.text[first : first + MAX_CHARACTERS]
    outside = sum(start < first or end > first + len(text) for _, start, end in wrong)
    truth, predicted = (_in_excerpt(group, first, len(text)) for group in spans)
    return Mistake(example.id, text, truth, predicted, loss, first, outside)


def _in_excerpt(spans: set[Span], first: int, length: int) -> list[list[Any]]:
    """Spans relative to the excerpt of the text from `first` on, cut at its ends."""
    inside = [(max(0, start - first), min(length, end - first), name) for name, start, end in spans]
    return [[name, start, end] for start, end, name in sorted(inside) if start < end]
