"""Detailed evaluations of the best trials in words. In a document an unknown value is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.report.formats import format_metric_interval, format_number, with_baseline

if TYPE_CHECKING:
    from hpo.study.reading.study_record import TrialRecord

SPLITS = ("test", "validation", "train")
"""In the order of the page: what the search has not seen comes first."""


@dataclass(frozen=True)
class Detailed:
    """The detailed evaluation of one trial on one split."""

    trial_number: int
    split: str
    document: Mapping[str, Any]

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        of_task: Mapping[str, Mapping[str, Any]] = self.document["tasks"]
        return of_task

    @property
    def warnings(self) -> list[str]:
        return [f"{task}: {text}" for task, of in self.tasks.items() for text in of["warnings"] or ()]


def evaluations_of(trial: TrialRecord) -> list[Detailed]:
    """Of one trial, in the order of `SPLITS`, then others."""
    splits = sorted(trial.detailed, key=lambda split: ((*SPLITS, split).index(split), split))
    return [Detailed(trial.number, split, trial.detailed[split]) for split in splits]


def intervals(one: Detailed) -> list[dict[str, Any]]:
    """The score and every metric of every task: `task`, `metric`, `value`, `low`, `high`, `baseline`.

    The task of the score is empty.
    """
    score, baseline = one.document["score"], one.document["baseline"]
    rows = [{"task": "", "metric": "score", **score, "baseline": baseline.get("score")}] if score else []
    return rows + [
        {"task": task, "metric": metric, **interval, "baseline": baseline.get(f"{task}/{metric}")}
        for task, of_task in one.tasks.items()
        for metric, interval in of_task["metrics"].items()
    ]


def interval_text(row: Mapping[str, Any]) -> str:
    return format_metric_interval(row["value"], row["low"], row["high"])


def objectives(one: Detailed, metrics: Sequence[str]) -> dict[str, str]:
    """The values of a study's objectives with their intervals, by name.

    Without an objective that is a metric of the data: the score, else the first metric of each task.
    """
    rows = {f"{row['task']}/{row['metric']}".lstrip("/"): row for row in intervals(one)}
    shown = [name for name in metrics if name in rows] or [name for name in rows if name == "score"]
    shown = shown or [*{rows[name]["task"]: name for name in reversed(rows)}.values()][::-1]
    return {name: with_baseline(interval_text(rows[name]), rows[name]["baseline"]) for name in shown}


def headline(one: Detailed, metrics: Sequence[str]) -> str:
    """`test, 500 rows: score 0.821 [0.790, 0.848]`, of the objectives `metrics`."""
    values = ", ".join(map(" ".join, objectives(one, metrics).items()))
    return f"{one.split}, {num_rows(one)}: {values}"


def decided_text(one: Detailed) -> str:
    """`thresholds were chosen on validation`, and what that means there; empty where it is not known."""
    decided_on = one.document["decided_on"]
    if not decided_on:
        return ""
    flattering = ", so the scores here are flattering" if decided_on == one.split else ""
    return f"thresholds were chosen on {decided_on}{flattering}"


def num_rows(one: Detailed) -> str:
    count = one.document["num_examples"]
    return f"{format_number(count)} row{'' if count == 1 else 's'}"
