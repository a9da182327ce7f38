"""Detailed evaluations of the best trials as tables. An unknown value is None in a document, NaN or empty in
a table and a dash on the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.json_safe import is_number
from hpo.report.detailed import Detailed, evaluations_of, interval_text, intervals
from hpo.report.formats import BASELINE, format_number
from hpo.report.tables import task_metrics_table

if TYPE_CHECKING:
    from hpo.report.tables import StudyTables

MAX_CONFUSIONS = 20
_WHERE = ("number", "split", "task")
"""The first columns of every CSV table; `number` is the trial's."""
_WORST = ("id", "loss", "truth", "predicted", "text", "text_start")
_CLASS = ("class", "precision", "recall", "f1", "support", "predicted", "threshold")


def detailed_evaluations(tables: StudyTables) -> list[Detailed]:
    """Of the best trials, the best first."""
    return [one for trial in tables.best for one in evaluations_of(trial)]


def metrics_text(one: Detailed) -> pd.DataFrame:
    """`intervals` for people: task, metric, value with its interval, best constant prediction."""
    level = one.document["level"]
    interval = f"value [{level:.0%}]" if is_number(level) else "value [interval]"
    rows = [
        (row["task"] or "all tasks", row["metric"], interval_text(row), format_number(row["baseline"]))
        for row in intervals(one)
    ]
    return pd.DataFrame(rows, columns=["task", "metric", interval, BASELINE])


def sorted_classes(of_task: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The classes of a task, the most frequent first; of equally frequent ones that of the lower F1."""
    return sorted(
        of_task["classes"] or (),
        key=lambda one: (-(one["support"] or 0), one["f1"] if is_number(one["f1"]) else 2.0),
    )


def classes_text(of_task: Mapping[str, Any]) -> pd.DataFrame:
    rows = [
        [
            one["name"],
            *(f"{one[name]:.3f}" if is_number(one[name]) else "–" for name in ("precision", "recall", "f1")),
            format_number(one["support"]),
            format_number(one["num_predicted"]),
            format_number(of_task["threshold"]),
        ]
        for one in sorted_classes(of_task)
    ]
    table = pd.DataFrame(rows, columns=list(_CLASS))
    return table if is_number(of_task["threshold"]) else table.drop(columns="threshold")


def outside_text(num_spans: int) -> str:
    return f"and {num_spans} wrong span{'s' * (num_spans > 1)} outside this excerpt" if num_spans else ""


def confusions_text(of_task: Mapping[str, Any]) -> pd.DataFrame:
    """The most frequent pairs of a true class and another one that was predicted, for people."""
    pairs = [pair for pair in _confusions(of_task) if pair[0] != pair[1]]
    pairs = sorted(pairs, key=lambda pair: -pair[2])[:MAX_CONFUSIONS]
    rows = [(true, predicted, format_number(count)) for true, predicted, count in pairs]
    return pd.DataFrame(rows, columns=["true", "predicted", "rows"])


def csv_tables(tables: StudyTables) -> dict[str, pd.DataFrame]:
    """`classes`, `confusions`, `worst_errors` and `best_task_metrics`, by name.

    Lists in `worst_errors` are JSON. Places of spans are in its `text`, which begins at `text_start`.
    """
    every = detailed_evaluations(tables)
    return {
        "classes": _table(every, _classes, _CLASS),
        "confusions": _table(every, _confusions, ("true", "predicted", "count")),
        "worst_errors": _table(every, _worst, _WORST),
        "best_task_metrics": _metrics(tables, every),
    }


def _table(every: Sequence[Detailed], rows_of: Any, columns: Sequence[str]) -> pd.DataFrame:
    rows = [
        (one.trial_number, one.split, task, *row)
        for one in every
        for task, of_task in one.tasks.items()
        for row in rows_of(of_task)
    ]
    return pd.DataFrame(rows, columns=[*_WHERE, *columns])


def _classes(of_task: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for one in sorted_classes(of_task):
        shares = (one[name] for name in ("name", "precision", "recall", "f1"))
        yield (*shares, one["support"], one["num_predicted"], of_task["threshold"])


def _confusions(of_task: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    if confusion := of_task["confusion"]:
        labels = confusion["labels"]
        for true, predicted, count in confusion["counts"]:
            yield labels[true], labels[predicted], count


def _worst(of_task: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for one in of_task["worst"] or ():
        said = (_as_text(one[name]) for name in ("truth", "predicted"))
        yield one["id"], one["loss"], *said, one["text"], one["text_start"]


def _as_text(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _metrics(tables: StudyTables, every: Sequence[Detailed]) -> pd.DataFrame:
    """Every metric of the best trials on each split that they were evaluated on; the search's own have no
    intervals.
    """
    columns = ["task", "metric", "value", "low", "high", "baseline", "split", "number"]
    rows = [row | {"split": one.split, "number": one.trial_number} for one in every for row in intervals(one)]
    searched = [
        row | {"split": "validation", "number": trial.number}
        for trial in tables.best
        if "validation" not in trial.detailed
        for row in task_metrics_table(trial.telemetry).to_dict("records")
    ]
    return pd.DataFrame([*searched, *rows], columns=columns)
