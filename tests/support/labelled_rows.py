"""Rows with given labels, and the statistics of predictions for them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task
from hpo.training.metrics import RowStatistics, row_statistics

TEXT = "the quick brown fox jumps over the lazy dog"
CLASSES = ("a", "b", "c")
LISTS: list[Any] = [[], ["a"], ["b"], ["c"], ["a", "b"], ["a", "c"], ["b", "c"], ["a", "b", "c"]]


def rows_of(task: Task, truths: Iterable[Any]) -> list[Example]:
    """Return rows of these truths; None: not labelled. Spans are lists of (name, start, end)."""
    rows = []
    for truth in truths:
        spans: dict[str, list[tuple[int, int]]] = {}
        for name, start, end in truth or () if KINDS[task.kind].in_spans else ():
            spans.setdefault(name, []).append((start, end))
        labelled = frozenset([task.name] if truth is not None else [])
        rows.append(Example("", TEXT, dict.fromkeys(labelled, truth), spans, annotated=labelled))
    return rows


def statistics_of(task: Task, truths: Sequence[Any], predicted: Iterable[Any]) -> RowStatistics:
    return row_statistics(task, [*predicted], rows_of(task, truths))


def random_truth(kind: str, rng: np.random.Generator) -> Any:
    if kind == "single_label":
        return str(rng.choice(CLASSES, p=[0.6, 0.3, 0.1]))
    if kind == "multi_label":
        return LISTS[rng.integers(8)]
    if kind == "regression":
        return float(rng.integers(11))
    is_answer = kind == "span_extraction"
    starts = rng.permutation([0, 4, 10, 16])[: 1 if is_answer else rng.integers(0, 4)]
    return [("a" if is_answer else str(rng.choice(CLASSES)), int(at), int(at) + 3) for at in starts]


def random_rows(kind: str, num: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Return random truths, and predictions that are right in half of the rows."""
    rng = np.random.default_rng(seed)
    truths = [random_truth(kind, rng) for _ in range(num)]
    return truths, [truth if rng.random() < 0.5 else random_truth(kind, rng) for truth in truths]
