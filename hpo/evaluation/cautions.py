"""Caveats about an evaluation, as sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpo.evaluation.record import ClassFigures
from hpo.tasks.kind import is_error, kind_of
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
    """Return warnings about one task on one split, for predictions with `decisions`.

    `baseline` has the values of the best constant predictions (`hpo.evaluation.contributions.baselines`).
    """
    task, num_rows, kind = statistics.task, statistics.num_rows, kind_of(statistics.task)
    if not num_rows:
        return (f"No row of this split is labelled for {task.name}.",)
    scores, metric = statistics.scores(), task.primary_metric
    warnings = baseline_warnings(metric, scores.get(metric), baseline.get(f"{task.name}/{metric}"))
    if not scores:
        warnings.append("Some predictions are not finite, so there is no metric.")
    if num_rows < FEW_ROWS:
        warnings.append(f"Labelled rows: only {num_rows}, so all figures are uncertain.")
    threshold = kind.decided_by(decisions)
    is_everywhere = [one for one in classes if kind.is_by_row and one.num_predicted == num_rows > one.support]
    groups = {
        "Never predicted": [one for one in classes if one.support and not one.num_predicted],
        f"Predicted in every row{threshold}": is_everywhere,
        f"Fewer than {FEW_ROWS_OF_A_CLASS} {'rows' if kind.is_by_row else 'spans'}": [
            one for one in classes if 0 < one.support < FEW_ROWS_OF_A_CLASS
        ],
        "Not in this split": [one for one in classes if not one.support],
    }
    return (*warnings, *(f"{title}: {_names(group)}." for title, group in groups.items() if group))


def baseline_warnings(metric: str, value: float | None, baseline: float | None) -> list[str]:
    """Warn of a value that is not better than that of the best constant prediction."""
    if value is None or baseline is None or (value < baseline if is_error(metric) else value > baseline):
        return []
    better = "below" if is_error(metric) else "above"
    return [f"{metric} is not {better} that of the best constant prediction ({baseline:.4g})."]


def _names(classes: Sequence[ClassFigures]) -> str:
    shown = ", ".join(f"`{one.name}`" for one in classes[:_NAMES_SHOWN])
    return shown if len(classes) <= _NAMES_SHOWN else f"{shown} and {len(classes) - _NAMES_SHOWN} more"
