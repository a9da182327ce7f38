"""What a reader of an evaluation must know before believing it, in whole sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpo.evaluation.classes import ClassFigures
from hpo.training.metrics import RowStatistics

FEW_ROWS_OF_A_CLASS = 10
FEW_ROWS = 30
MOST_ROWS, FAR_ABOVE = 0.95, 1.5
"""What is predicted in more than this share of the rows, or of the words, and so much oftener than it is
true, is predicted as if everywhere."""
_NAMES_SHOWN = 5


def task_warnings(
    statistics: RowStatistics,
    classes: Sequence[ClassFigures],
    threshold: float | None,
    coverage: tuple[float, float] = (0.0, 0.0),
) -> tuple[str, ...]:
    """Of one task on one split; `threshold` is the probability above which it predicts, where it has one.

    `coverage` are the shares of the words that lie in predicted and in true spans.
    """
    task, num_rows = statistics.task, statistics.num_rows
    if not num_rows:
        return (f"No row of this split is annotated for {task.name}: there is nothing to evaluate.",)
    warnings = []
    if not statistics.scores():
        warnings.append("Some predictions are not finite, so there is no metric.")
    if num_rows < FEW_ROWS:
        rows = "Only 1 row is" if num_rows == 1 else f"Only {num_rows} rows are"
        warnings.append(f"{rows} annotated: the intervals are too narrow, and the figures say little.")
    is_label = task.kind in ("single_label", "multi_label")
    is_by_row = is_label or task.kind == "span_extraction"
    everything = [one for one in classes if is_by_row and one.num_predicted == num_rows > one.support]
    predicted = sum(one.num_predicted for one in classes)
    at = "" if threshold is None else f" at the threshold {threshold:.3g}"
    item = "class" if is_label else "span"
    if classes and not predicted and any(one.support for one in classes):
        warnings.append(f"No {item} is predicted in any row{at}.")
        everything = []
    else:
        unpredicted = [one.name for one in classes if one.support and not one.num_predicted]
        if unpredicted:
            verb = "occurs but is" if len(unpredicted) == 1 else "occur but are"
            warnings.append(f"{_names(unpredicted)} {verb} never predicted.")
    if everything and task.kind == "multi_label" and predicted == num_rows * len(classes):
        warnings.append(f"Every class is predicted in every row{at}.")
    elif everything:
        verb = "is" if len(everything) == 1 else "are"
        names = _names([one.name for one in everything])
        warnings.append(f"{names} {verb} predicted in every row{at if task.kind == 'multi_label' else ''}.")
    nearly = [one for one in classes if is_by_row and one not in everything and _is_flooded(one, num_rows)]
    if nearly:
        said = ", ".join(f"`{one.name}` in {one.num_predicted:,} (true in {one.support:,})" for one in nearly)
        warnings.append(f"Nearly every one of the {num_rows:,} rows gets the same prediction{at}: {said}.")
    found, true = coverage
    if found > MOST_ROWS and found > FAR_ABOVE * true:
        warnings.append(f"Predicted spans cover {found:.0%} of the words{at}, true ones {true:.0%}.")
    rare = [one.name for one in classes if 0 < one.support < FEW_ROWS_OF_A_CLASS]
    if rare:
        has = "has" if len(rare) == 1 else "have"
        what = "rows" if is_by_row else "spans"
        few = f"fewer than {FEW_ROWS_OF_A_CLASS} {what}"
        warnings.append(f"{_names(rare)} {has} {few}: figures of so few are mostly chance.")
    absent = [one.name for one in classes if not one.support]
    if absent:
        verb = "does" if len(absent) == 1 else "do"
        warnings.append(f"{_names(absent)} {verb} not occur in this split.")
    return tuple(warnings)


def _is_flooded(one: ClassFigures, num_rows: int) -> bool:
    often = MOST_ROWS * num_rows < one.num_predicted
    return often and one.num_predicted > FAR_ABOVE * one.support


def search_warning(
    metric: str,
    split: str,
    width: float,
    best: float,
    others: Sequence[float],
    num_rows: tuple[int, int] | None = None,
) -> str | None:
    """What the width of the objective's interval on a split says of the search; None where it tells all
    trials apart.

    `best` and `others` are the values of the complete trials on validation. `num_rows`, of the split and of
    validation, is for another split than validation: a width goes with one over the square root of the rows.
    Trials nearer to the best than the interval is wide may be as good: their order is that of this sample of
    texts. (Two trials are scored on the same texts, so a paired interval of their difference would be
    narrower; the width is what is known without their predictions.)
    """
    said = f"The interval of {metric} on {split} is {width:.3g} wide"
    if num_rows is not None and min(num_rows) > 0 and num_rows[0] != num_rows[1]:
        width *= math.sqrt(num_rows[0] / num_rows[1])
        said += (
            f", of {num_rows[0]:,} rows; of the {num_rows[1]:,} of validation it would be about {width:.3g}"
        )
    num_near = sum(abs(value - best) <= width for value in others)
    if not num_near:
        return None
    return (
        f"{said}; {num_near} of the {len(others)} other complete trials lie within that of the best, so the "
        "search cannot tell them apart."
    )


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
