"""The rows that a model got wrong, the worst first: where to look at texts and truths.

How bad a row is: -log of the probability of the true class (single_label), the sum of the classes' binary
cross-entropies (multi_label), the absolute error (regression), or the missed and the spurious spans together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.data.examples import Example
from hpo.data.tasks import Task
from hpo.tasks.registry import KINDS
from hpo.training.metrics import Span, accepted_answers, indicators, true_spans

MAX_MISTAKES = 20
MAX_CHARACTERS = 1000
_BEFORE = 200
"""Characters of a long text that are shown before its first wrong span."""
_LEAST_PROBABILITY = 1e-15
"""Losses are of probabilities between this and what is as far from 1."""
_AT_ONCE = 2**20
"""Losses of rows with so many probabilities are computed at a time, for the memory."""


@dataclass(frozen=True)
class Mistake:
    """One row that is wrong."""

    id: str
    text: str
    """At most 1,000 characters: the beginning, or for spans the part in which the first wrong one is."""
    truth: Any
    """A class, a list of classes, a number, or a list of [name, start, end] in `text`."""
    predicted: Any
    loss: float
    text_start: int = 0
    """Where `text` begins in the text of the row, in characters."""
    num_outside: int = 0
    """Wrong spans, of the truth or predicted, that do not lie in `text` as a whole."""


def worst_mistakes(
    task: Task,
    predicted: Sequence[Any],
    examples: Sequence[Example],
    probabilities_NC: NDArray[np.float64] | None,
    limit: int = MAX_MISTAKES,
) -> tuple[Mistake, ...]:
    """At most `limit` wrong rows of the annotated `examples`; of equal loss the earlier one first.

    `probabilities_NC` are those of single_label and multi_label.
    """
    loss_N = np.zeros(0) if not examples else _losses(task, predicted, examples, probabilities_NC)
    order = np.argsort(-loss_N, kind="stable")
    wrong = [n for n in order[np.isfinite(loss_N[order])].tolist() if loss_N[n] > 0]
    return tuple(_mistake(task, predicted[n], examples[n], float(loss_N[n])) for n in wrong[:limit])


def _losses(
    task: Task,
    predicted: Sequence[Any],
    examples: Sequence[Example],
    probabilities_NC: NDArray[np.float64] | None,
) -> NDArray[np.float64]:
    """[N]; 0 for a row that is right."""
    if KINDS[task.kind].in_spans:
        pairs = zip(predicted, examples, strict=True)
        return np.array([float(len(_wrong_spans(task, *pair))) for pair in pairs])
    truth: list[Any] = [example.labels[task.name] for example in examples]
    if task.kind == "regression":
        return np.abs(np.array(predicted, np.float64) - np.array(truth, np.float64))
    assert probabilities_NC is not None
    is_single = task.kind == "single_label"
    both = zip(predicted, truth, strict=True)
    is_wrong_N = [ours != theirs if is_single else set(ours) != set(theirs) for ours, theirs in both]
    wrong = np.flatnonzero(is_wrong_N)
    loss_N = np.zeros(len(truth))
    rows_at_once = max(1, _AT_ONCE // len(task.labels))
    for first in range(0, len(wrong), rows_at_once):
        rows = wrong[first : first + rows_at_once]
        loss_N[rows] = _cross_entropies(task, probabilities_NC[rows], [truth[n] for n in rows])
    return loss_N


def _cross_entropies(task: Task, p_NC: NDArray[np.float64], truth: Sequence[Any]) -> NDArray[np.float64]:
    """[N]: of the true class, or summed over the classes."""
    p_NC = np.clip(p_NC, _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    if task.kind == "single_label":
        true_NC = indicators(task, [[label] for label in truth])
        return np.asarray(-np.log(p_NC[true_NC]))
    return np.asarray(-np.log(np.where(indicators(task, truth), p_NC, 1 - p_NC)).sum(axis=1))


def _truth(task: Task, example: Example) -> set[Span]:
    """True spans; of several accepted answers the one that counts as the truth, or the first."""
    truth = true_spans(task, example)
    if task.kind == "span_extraction" and not truth:
        truth = {(task.labels[0], *answer) for answer in accepted_answers(task, example)[:1]}
    return truth


def _wrong_spans(task: Task, predicted: Sequence[Span], example: Example) -> set[Span]:
    """The missed and the spurious spans; an answer that is one of the accepted ones leaves none."""
    if task.kind == "span_extraction":
        accepted = accepted_answers(task, example)
        if any((start, end) in accepted for _, start, end in predicted[:1]):
            return set()
    return _truth(task, example) ^ set(predicted)


def _mistake(task: Task, predicted: Any, example: Example, loss: float) -> Mistake:
    if not KINDS[task.kind].in_spans:
        truth: Any = example.labels[task.name]
        if task.kind == "multi_label":  # both in the order of the task's classes
            truth, predicted = ([c for c in task.labels if c in side] for side in (truth, predicted))
        return Mistake(example.id, example.text[:MAX_CHARACTERS], truth, predicted, loss)
    spans = [_truth(task, example), set(predicted)]
    first = 0
    if max(end for side in spans for _, _, end in side) > MAX_CHARACTERS:
        first_wrong = min(start for _, start, _ in spans[0] ^ spans[1])
        first = max(0, min(first_wrong - _BEFORE, len(example.text) - MAX_CHARACTERS))
    text = example.text[first : first + MAX_CHARACTERS]
    wrong = spans[0] ^ spans[1]
    outside = sum(start < first or end > first + len(text) for _, start, end in wrong)
    truth, predicted = (_shown(side, first, len(text)) for side in spans)
    return Mistake(example.id, text, truth, predicted, loss, first, outside)


def _shown(spans: set[Span], first: int, length: int) -> list[list[Any]]:
    """Spans as they lie in the part of the text from `first` on, cut at its ends."""
    inside = [(max(0, start - first), min(length, end - first), name) for name, start, end in spans]
    return [[name, start, end] for start, end, name in sorted(inside) if start < end]
