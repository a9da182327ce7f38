"""Whether the search could tell its trials apart, by the interval of the best one's objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpo.evaluation.cautions import search_warning
from hpo.evaluation.intervals import Interval
from hpo.study.study_record import best_trials, complete_trials, is_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpo.study.study_record import StudyRecord

_SPLITS = ("validation", "test")
"""The objective is of validation; an interval on test is nearly as wide where the splits are of one size."""


def search_warnings(record: StudyRecord) -> list[str]:
    """A sentence for each objective whose interval is wider than differences that the search found.

    Of the best trial, where it has a detailed evaluation on validation or test.
    """
    best = best_trials(record)
    documents = [best[0].detailed[split] for split in _SPLITS if split in best[0].detailed] if best else []
    if not documents:
        return []
    values = zip(*(trial.values or () for trial in complete_trials(record)), strict=True)
    found = [
        search_warning(metric, documents[0]["split"], interval, of_trials, direction)
        for metric, direction, of_trials in zip(record.metric_names, record.directions, values, strict=True)
        if (interval := _interval(documents[0], metric)) is not None
    ]
    return [text for text in found if text is not None]


def _interval(document: Mapping[str, Any], metric: str) -> Interval | None:
    """Of an objective; None where a detailed evaluation does not have it."""
    task, _, name = metric.rpartition("/")
    found = document["tasks"].get(task, {}).get("metrics", {}).get(name) if task else None
    if metric == "score":
        found = document["score"]
    if not found or not all(is_number(found[end]) for end in ("value", "low", "high")):
        return None
    return Interval(found["value"], found["low"], found["high"])
