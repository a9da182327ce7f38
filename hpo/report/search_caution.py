"""Whether the search could tell its trials apart, by the interval of the best one's objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpo.evaluation.cautions import search_warning
from hpo.study.study_record import best_trials, complete_trials, is_number, loss_signs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpo.study.study_record import StudyRecord, TrialRecord

_SPLITS = ("validation", "test")
"""The objective is of validation; an interval on test tells its width there by the numbers of rows."""


def search_warnings(record: StudyRecord) -> list[str]:
    """A sentence for each objective whose interval is wider than differences that the search found.

    Of the trial that is the best by that objective, where it has a detailed evaluation on validation or test.
    """
    best, complete = best_trials(record), complete_trials(record)
    signs = loss_signs(record.directions)
    found = []
    for k, metric in enumerate(record.metric_names if best else ()):
        of_trials = {trial.number: trial.values[k] for trial in complete if trial.values}
        trial = min(best, key=lambda one: signs[k] * of_trials[one.number])
        split = next((split for split in _SPLITS if split in trial.detailed), None)
        width = None if split is None else _width(trial.detailed[split], metric)
        if split is not None and width is not None:
            rows = None if split == "validation" else _num_rows(trial, split)
            value = of_trials.pop(trial.number)
            found.append(search_warning(metric, split, width, value, list(of_trials.values()), rows))
    return [text for text in found if text is not None]


def _num_rows(trial: TrialRecord, split: str) -> tuple[int, int] | None:
    """Of the split and of validation; None where a trial does not say it."""
    splits = (trial.telemetry.get("data") or {}).get("splits", {})
    return (splits[split], splits["validation"]) if {split, "validation"} <= splits.keys() else None


def _width(document: Mapping[str, Any], metric: str) -> float | None:
    """Of an objective's interval; None where a detailed evaluation does not have it."""
    task, _, name = metric.rpartition("/")
    found = document["tasks"].get(task, {}).get("metrics", {}).get(name) if task else None
    if metric == "score":
        found = document["score"]
    if not found or not all(is_number(found[end]) for end in ("value", "low", "high")):
        return None
    return float(found["high"] - found["low"])
