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
    assert text.startswith("The interval of score on test is 0.16 wide; 1 of the 3 other complete")
    assert search_warnings(record(evaluated(0.07))) == [], "0.14 is less than 0.15"
    assert search_warnings(record({})) == []
    assert search_warnings(record(evaluated(0.2), of=0)) == [], "that is not the best one"
    assert search_warnings(record_of([])) == []


def test_validation_comes_first_as_it_gave_the_values() -> None:
    (text,) = search_warnings(record(evaluated(0.08) | evaluated(0.1, "validation")))
    assert text.startswith("The interval of score on validation is 0.2 wide")


@pytest.mark.parametrize(
    ("metric", "num_near"),
    [("size/mae", 2), ("size/r2", None), ("other/mae", None), ("train_examples_per_second", None)],
)
def test_an_objective_of_one_task(metric: str, num_near: int | None) -> None:
    options = {"metric_names": (metric,), "directions": ("minimize",)}
    texts = search_warnings(record(evaluated(0.03), of=0, **options))
    expected = [] if num_near is None else [f"{num_near} of the 3 other complete trials"]
    assert len(texts) == len(expected)
    assert all(part in text for part, text in zip(expected, texts, strict=True))


def test_a_score_that_is_not_known() -> None:
    for score in (None, interval(None)):
        assert search_warnings(record({"test": document({}, score=score)})) == []


def test_the_width_on_another_split_is_scaled_to_the_rows_of_validation() -> None:
    found = record(evaluated(0.01))
    assert search_warnings(found) == []
    found.trials[3].telemetry["data"] = {"splits": {"train": 9, "validation": 100, "test": 10_000}}
    (text,) = search_warnings(found)
    assert "is 0.02 wide, of 10,000 rows; of the 100 of validation it would be about 0.2" in text
    assert "3 of the 3 other complete trials" in text
    found.trials[3] = dataclasses.replace(found.trials[3], detailed=evaluated(0.01, "validation"))
    assert search_warnings(found) == [], "validation has the rows that it has"


def test_each_of_several_objectives_is_told_of_the_trial_that_is_its_best() -> None:
    found = record_of(
        [with_values(number, values) for number, values in enumerate([(0.7, 0.5), (0.6, 0.45), (0.5, 0.2)])],
        metric_names=("score", "size/mae"),
        directions=("maximize", "minimize"),
    )
    narrow, wide = evaluated(0.01), evaluated(0.2)
    found.trials[0] = dataclasses.replace(found.trials[0], detailed=wide)
    (text,) = search_warnings(found)
    assert text.startswith("The interval of score on test"), "trial 0 is not the best by its error"
    found.trials[2] = dataclasses.replace(found.trials[2], detailed=narrow)
    assert len(search_warnings(found)) == 1
    found.trials[2] = dataclasses.replace(found.trials[2], detailed=wide)
    assert "2 of the 2 other" in search_warnings(found)[1]
