"""How each class does, and which classes are taken for which.

Precision, recall and F1 are scikit-learn's with `zero_division=0`, and None for a class that is neither true
nor predicted anywhere: there is nothing to say of it. A span is right if its name, start and end are.
"""

from __future__ import annotations

from scipy.sparse import coo_array

from hpo.evaluation.record import ClassFigures, Confusion
from hpo.tasks.kind import KINDS
from hpo.training.metrics import RowStatistics


def class_figures(statistics: RowStatistics) -> tuple[ClassFigures, ...]:
    """In the order of the task's labels; none for a regression, or without an annotated row."""
    if not statistics.counts_NC or not statistics.num_rows:
        return ()
    columns = [values.astype(int).tolist() for values in statistics.class_counts()]
    return tuple(
        _figures(name, *counts) for name, *counts in zip(statistics.task.labels, *columns, strict=True)
    )


def _figures(name: str, hits: int, support: int, num_predicted: int) -> ClassFigures:
    if not support + num_predicted:
        return ClassFigures(name, None, None, None, 0, 0)
    return ClassFigures(
        name,
        hits / max(num_predicted, 1),
        hits / max(support, 1),
        2 * hits / (support + num_predicted),
        support,
        num_predicted,
    )


def confusion(statistics: RowStatistics) -> Confusion | None:
    """Of the kinds whose truth is classes; None for the others, or without an annotated row."""
    task = statistics.task
    if not KINDS[task.kind].has_classes or not statistics.num_rows:
        return None
    pairs = coo_array(statistics.counts_NC["true"].T @ statistics.counts_NC["predicted"])
    columns = (values.astype(int).tolist() for values in (*pairs.coords, pairs.data))
    return Confusion(task.labels, tuple(sorted(zip(*columns, strict=True))))
