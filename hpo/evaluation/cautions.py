"""What a reader of an evaluation must know before believing it, in whole sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpo.evaluation.record import ClassFigures
from hpo.tasks.kind import Kind, is_error, kind_of
from hpo.tasks.options import DecodingThresholds
from hpo.training.metrics import RowStatistics

FEW_ROWS_OF_A_CLASS = 10
FEW_ROWS = 30
_NAMES_SHOWN = 5


def task_warnings(
    statistics: RowStatistics,
    classes: Sequence[ClassFigures],
    decisions: DecodingThresholds,
    baseline: Mapping[str, float],
) -> tuple[str, ...]:
    """The warnings about one task on one split, whose predictions were made with `decisions`.

    `baseline` has the values of the best constant predictions (`hpo.evaluation.contributions.baselines`).
    """
    task, num_rows = statistics.task, statistics.num_rows
    if not num_rows:
        return (f"No row of this split is annotated for {task.name}: there is nothing to evaluate.",)
    scores, metric = statistics.scores(), task.primary_metric
    warnings = baseline_warnings(metric, scores.get(metric), baseline.get(f"{task.name}/{metric}"))
    if not scores:
        warnings.append("Some predictions are not finite, so there is no metric.")
    if num_rows < FEW_ROWS:
        rows = "Only 1 row is" if num_rows == 1 else f"Only {num_rows} rows are"
        warnings.append(f"{rows} annotated: the figures say little.")
    kind = kind_of(task)
    at, item = kind.decided_by(decisions), "class" if kind.has_classes else "span"
    if classes and not any(one.num_predicted for one in classes) and any(one.support for one in classes):
        warnings.append(f"No {item} is predicted in any row{at}.")
    else:
        unpredicted = [one.name for one in classes if one.support and not one.num_predicted]
        if unpredicted:
            verb = "occurs but is" if len(unpredicted) == 1 else "occur but are"
            warnings.append(f"{_names(unpredicted)} {verb} never predicted.")
    if kind.is_by_row:
        warnings += _everywhere(kind, classes, num_rows, at)
    rare = [one.name for one in classes if 0 < one.support < FEW_ROWS_OF_A_CLASS]
    if rare:
        has = "has" if len(rare) == 1 else "have"
        what = "rows" if kind.is_by_row else "spans"
        few = f"fewer than {FEW_ROWS_OF_A_CLASS} {what}"
        warnings.append(f"{_names(rare)} {has} {few}: figures of so few are mostly chance.")
    absent = [one.name for one in classes if not one.support]
    if absent:
        verb = "does" if len(absent) == 1 else "do"
        left_out = "; f1_macro is of the others" if "f1_macro" in task.metrics else ""
        warnings.append(f"{_names(absent)} {verb} not occur in this split{left_out}.")
    return tuple(warnings)


def baseline_warnings(metric: str, value: float | None, baseline: float | None) -> list[str]:
    """The warning about a value that is not better than that of the best constant prediction, if any."""
    if value is None or baseline is None or (value < baseline if is_error(metric) else value > baseline):
        return []
    side = "below" if is_error(metric) else "above"
    return [f"{metric} is not {side} that of the best constant prediction ({baseline:.4g})."]


def _everywhere(kind: Kind, classes: Sequence[ClassFigures], num_rows: int, at: str) -> list[str]:
    """A warning about the classes that are predicted in every row, though they are not true in every row."""
    names = [one.name for one in classes if one.num_predicted == num_rows > one.support]
    if not names:
        return []
    is_all = kind.is_list and len(names) == len(classes) > 1
    verb = "is" if len(names) == 1 or is_all else "are"
    return [f"{'Every class' if is_all else _names(names)} {verb} predicted in every row{at}."]


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
