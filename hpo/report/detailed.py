"""Detailed evaluations of the best trials as text and tables. In a document an unknown value is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.json_safe import is_number
from hpo.report.formats import format_interval, format_number, format_percent, plural
from hpo.report.messages import BASELINE, with_baseline
from hpo.report.terminal import Rows
from hpo.study.reading.study_record import TrialRecord

SPLITS = ("test", "validation", "train")
"""Order of the page: splits unseen by the search come first."""
MAX_CONFUSIONS = 20


@dataclass(frozen=True)
class Detailed:
    """Detailed evaluation of one trial on one split."""

    trial_number: int
    split: str
    document: Mapping[str, Any]

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        tasks: Mapping[str, Mapping[str, Any]] = self.document["tasks"]
        return tasks

    @property
    def warnings(self) -> list[str]:
        return [f"{name}: {text}" for name, task in self.tasks.items() for text in task["warnings"] or ()]

    @property
    def title(self) -> str:
        return f"Trial {self.trial_number} on {self.split}: {self.num_rows}"

    @property
    def num_rows(self) -> str:
        return plural(self.document["num_examples"], "row")

    @property
    def thresholds(self) -> str:
        """The split of the choice of thresholds; empty if unknown."""
        split = self.document["decided_on"]
        if not split:
            return ""
        flattering = ", so the scores here are flattering" if split == self.split else ""
        return f"thresholds were chosen on {split}{flattering}"


def evaluations_of(trial: TrialRecord) -> list[Detailed]:
    """Return the evaluations of a trial in the order of `SPLITS`."""
    splits = sorted(trial.detailed, key=lambda split: ((*SPLITS, split).index(split), split))
    return [Detailed(trial.number, split, trial.detailed[split]) for split in splits]


def intervals(one: Detailed) -> dict[str, dict[str, Any]]:
    """Return `task`, `metric`, `value`, `low`, `high`, `baseline` of the score and of `<task>/<metric>`.

    The task of the score is empty.
    """
    score, baseline = one.document["score"], one.document["baseline"]
    rows = {"score": {"task": "", "metric": "score", **score}} if score else {}
    for name, task in one.tasks.items():
        for metric, interval in task["metrics"].items():
            rows[f"{name}/{metric}"] = {"task": name, "metric": metric, **interval}
    return {name: row | {"baseline": baseline.get(name)} for name, row in rows.items()}


def objectives(one: Detailed, metrics: Sequence[str]) -> dict[str, str]:
    """Return the values of a study's objectives with their intervals, by name.

    If no objective is a metric of the data: the score, else the first metric of each task.
    """
    rows = intervals(one)
    shown = [name for name in metrics if name in rows] or [name for name in rows if name == "score"]
    shown = shown or [*{row["task"]: name for name, row in reversed(rows.items())}.values()][::-1]
    return {name: with_baseline(_interval(rows[name]), rows[name]["baseline"]) for name in shown}


def headline(one: Detailed, metrics: Sequence[str]) -> str:
    """`test, 500 rows: score 0.821 [0.790, 0.848]`."""
    values = ", ".join(map(" ".join, objectives(one, metrics).items()))
    return f"{one.split}, {one.num_rows}: {values}"


def metrics_table(one: Detailed) -> Rows:
    """A row for each metric: its value with an interval, and the best constant prediction."""
    level = one.document["level"]
    interval = f"value [{format_percent(level) if is_number(level) else 'interval'}]"
    return [
        {
            "task": row["task"] or "all tasks",
            "metric": row["metric"],
            interval: _interval(row),
            BASELINE: format_number(row["baseline"]),
        }
        for row in intervals(one).values()
    ]


def classes_table(task: Mapping[str, Any]) -> Rows:
    """A row for each class of a task, the most frequent first, then by F1."""
    classes = sorted(
        task["classes"] or (),
        key=lambda one: (-(one["support"] or 0), one["f1"] if is_number(one["f1"]) else 2.0),
    )
    return [
        {
            "class": one["name"],
            **{name: format_number(one[name]) for name in ("precision", "recall", "f1", "support")},
            "predicted": format_number(one["num_predicted"]),
        }
        for one in classes
    ]


def confusions_table(task: Mapping[str, Any]) -> Rows:
    """The most frequent pairs of a true class and another, predicted class."""
    confusion = task["confusion"] or {"labels": [], "counts": []}
    labels, pairs = confusion["labels"], [pair for pair in confusion["counts"] if pair[0] != pair[1]]
    return [
        {"true": labels[true], "predicted": labels[predicted], "rows": format_number(count)}
        for true, predicted, count in sorted(pairs, key=lambda pair: -pair[2])[:MAX_CONFUSIONS]
    ]


def task_metrics_table(telemetry: Mapping[str, Any]) -> Rows:
    """The metrics of each task on validation and the best constant predictions."""
    baseline = telemetry.get("baseline") or {}
    return [
        {
            "task": task,
            "metric": metric,
            "value": format_number(value),
            BASELINE: format_number(baseline.get(f"{task}/{metric}")),
        }
        for task, values in (telemetry.get("metrics") or {}).items()
        for metric, value in values.items()
    ]


def source_metrics_table(telemetry: Mapping[str, Any]) -> Rows:
    """The metrics of each source of the data; no rows unless a task has several sources."""
    return [
        {"task": task, "source": source, "metric": metric, "value": format_number(value)}
        for source, tasks in (telemetry.get("source_metrics") or {}).items()
        for task, metrics in tasks.items()
        for metric, value in metrics.items()
    ]


def _interval(row: Mapping[str, Any]) -> str:
    return format_interval(row["value"], row["low"], row["high"])
