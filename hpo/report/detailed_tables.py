"""Detailed evaluations of the best trials as tables of text. An unknown value is a dash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from hpo.json_safe import is_number
from hpo.report.detailed import Detailed, evaluations_of, interval_text, intervals
from hpo.report.formats import BASELINE, format_number

if TYPE_CHECKING:
    from hpo.report.tables import StudyTables

MAX_CONFUSIONS = 20
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


def classes_text(of_task: Mapping[str, Any]) -> pd.DataFrame:
    """The classes of a task, the most frequent first; of equally frequent ones that of the lower F1."""
    classes = sorted(
        of_task["classes"] or (),
        key=lambda one: (-(one["support"] or 0), one["f1"] if is_number(one["f1"]) else 2.0),
    )
    rows = [
        [
            one["name"],
            *(f"{one[name]:.3f}" if is_number(one[name]) else "–" for name in ("precision", "recall", "f1")),
            format_number(one["support"]),
            format_number(one["num_predicted"]),
            format_number(of_task["threshold"]),
        ]
        for one in classes
    ]
    table = pd.DataFrame(rows, columns=list(_CLASS))
    return table if is_number(of_task["threshold"]) else table.drop(columns="threshold")


def outside_text(num_spans: int) -> str:
    return f"and {num_spans} wrong span{'s' * (num_spans > 1)} outside this excerpt" if num_spans else ""


def confusions_text(of_task: Mapping[str, Any]) -> pd.DataFrame:
    """The most frequent pairs of a true class and another one that was predicted, for people."""
    confusion = of_task["confusion"] or {"labels": [], "counts": []}
    labels, pairs = confusion["labels"], [pair for pair in confusion["counts"] if pair[0] != pair[1]]
    pairs = sorted(pairs, key=lambda pair: -pair[2])[:MAX_CONFUSIONS]
    rows = [(labels[true], labels[predicted], format_number(count)) for true, predicted, count in pairs]
    return pd.DataFrame(rows, columns=["true", "predicted", "rows"])
