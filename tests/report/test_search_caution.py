"""When the interval of the objective is wider than what the search found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from detailed_documents import document, interval, task_document
from study_records import record_of, with_values

from hpo.report.search_caution import search_warnings
from hpo.study.study_record import StudyRecord

VALUES = (0.50, 0.52, 0.55, 0.70)


def record(detailed: dict[str, Any], of: int = 3, **options: Any) -> StudyRecord:
    """A study whose trials ended with `VALUES`; trial `of` was evaluated in detail."""
    trials = [with_values(number, (value,)) for number, value in enumerate(VALUES)]
    trials[of] = dataclasses.replace(trials[of], detailed=detailed)
    return record_of(trials, **options)


def evaluated(half: float, split: str = "test") -> dict[str, Any]:
    """A document whose intervals reach so far to both sides."""
    task = task_document("regression", {}) | {"metrics": {"mae": interval(0.6, half)}}
    return {split: document({"size": task}, split, score=interval(0.7, half))}


def test_trials_within_the_interval_of_the_best_are_counted() -> None:
    (text,) = search_warnings(record(evaluated(0.08)))
    assert text.startswith("The interval of score on test is 0.16 wide; 2 of 4 complete trials")
    assert search_warnings(record(evaluated(0.07))) == [], "0.14 is less than 0.15"
    assert search_warnings(record({})) == []
    assert search_warnings(record(evaluated(0.2), of=0)) == [], "that is not the best one"
    assert search_warnings(record_of([])) == []


def test_validation_comes_first_as_it_gave_the_values() -> None:
    (text,) = search_warnings(record(evaluated(0.08) | evaluated(0.1, "validation")))
    assert text.startswith("The interval of score on validation is 0.2 wide")


@pytest.mark.parametrize(
    ("metric", "num_near"),
    [("size/mae", 3), ("size/r2", None), ("other/mae", None), ("train_examples_per_second", None)],
)
def test_an_objective_of_one_task(metric: str, num_near: int | None) -> None:
    options = {"metric_names": (metric,), "directions": ("minimize",)}
    texts = search_warnings(record(evaluated(0.03), of=0, **options))
    expected = [] if num_near is None else [f"{num_near} of 4 complete trials"]
    assert len(texts) == len(expected)
    assert all(part in text for part, text in zip(expected, texts, strict=True))


def test_a_score_that_is_not_known() -> None:
    for score in (None, interval(None)):
        assert search_warnings(record({"test": document({}, score=score)})) == []
