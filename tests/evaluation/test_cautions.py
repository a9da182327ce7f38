from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpo.evaluation.cautions import task_warnings
from hpo.evaluation.classes import class_figures
from hpo.evaluation.contributions import baselines
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.tasks.options import DecodingThresholds
from hpo.training.metrics import RowStatistics, row_statistics

SINGLE = Task("t", "single_label", ("a", "b", "c"))
MULTI = Task("t", "multi_label", ("a", "b", "c"))
NUMBER = Task("t", "regression")
SPANS = Task("t", "token_classification", ("a",))


def warned(task: Task, truth: list[Any], predicted: list[Any], threshold: float | None = None) -> list[str]:
    """The warnings without that about the baseline. Spans are given as one span a row, or none."""
    statistics = statistics_of(task, truth, predicted)
    decisions = DecodingThresholds(threshold or 0.5)
    return list(task_warnings(statistics, class_figures(statistics), decisions, {}))


def statistics_of(task: Task, truth: list[Any], predicted: list[Any]) -> RowStatistics:
    rows = []
    for label in truth:
        is_label = task.kind in ("single_label", "multi_label", "regression")
        spans = {} if is_label or not label else {label[0][0]: [label[0][1:]]}
        rows.append(Example("", "a text", {"t": label}, spans, annotated=frozenset("t")))
    return row_statistics(task, predicted, rows)


def test_an_ordinary_evaluation_has_none() -> None:
    truth = ["a", "b", "c"] * 20
    assert warned(SINGLE, truth, truth[1:] + truth[:1]) == []
    sets = [["a"], ["b"], ["c"], []] * 20
    assert warned(MULTI, sets, sets[1:] + sets[:1], 0.5) == []
    assert warned(Task("t", "regression"), [1.0] * 30, [2.0] * 30) == []
    answers = [[("answer", 0, 1)], []] * 20
    assert warned(Task("t", "span_extraction", ("answer",)), answers, answers) == []


def test_a_threshold_that_predicts_everything_or_nothing() -> None:
    truth = [["a"], ["b"], ["c"], []] * 20
    assert warned(MULTI, truth, [["a", "b", "c"]] * 80, 0.0009) == [
        "Every class is predicted in every row at the threshold 0.0009."
    ]
    assert warned(MULTI, truth, [[]] * 80, 0.5) == ["No class is predicted in any row at the threshold 0.5."]
    assert warned(MULTI, truth, [["a", "b"], ["a", "c"]] * 40, 0.25) == [
        "`a` is predicted in every row at the threshold 0.25."
    ]
    # What holds in every row may be predicted there.
    assert warned(MULTI, [["a", "b", "c"]] * 40, [["a", "b", "c"]] * 40, 0.5) == []


def test_classes_that_are_never_predicted_or_always() -> None:
    assert warned(SINGLE, ["a", "b", "c"] * 20, ["a"] * 60) == [
        "`b`, `c` occur but are never predicted.",
        "`a` is predicted in every row.",
    ]
    slots = Task("t", "token_classification", ("a", "b"))
    truth = [[("a", 0, 1)], [("b", 0, 1)]] * 20
    assert warned(slots, truth, [[("a", 0, 1)]] * 40) == ["`b` occurs but is never predicted."]
    assert warned(slots, truth, [[]] * 40) == ["No span is predicted in any row."]
    answer = Task("t", "span_extraction", ("answer",))
    answers = [[("answer", 0, 1)], []] * 20
    assert warned(answer, answers, [[("answer", 0, 1)]] * 40) == [
        "`answer` is predicted in every row at the null offset 0."
    ]


def test_few_rows_and_classes_that_are_missing() -> None:
    few = "figures of so few are mostly chance"
    assert warned(SINGLE, ["a", "b"] * 5, ["b", "a"] * 5) == [
        "Only 10 rows are annotated: the figures say little.",
        f"`a`, `b` have fewer than 10 rows: {few}.",
        "`c` does not occur in this split; f1_macro is of the others.",
    ]
    assert warned(SINGLE, ["a"], ["a"])[0].startswith("Only 1 row is annotated: ")
    assert warned(SINGLE, [], []) == [
        "No row of this split is annotated for t: there is nothing to evaluate."
    ]
    many = Task("t", "single_label", tuple("abcdefgh"))
    assert warned(many, ["a"] * 30, ["a"] * 30) == [
        "`b`, `c`, `d`, `e`, `f` and 2 more do not occur in this split; f1_macro is of the others."
    ]


@pytest.mark.parametrize(
    ("task", "truth", "predicted", "comparison"),
    [
        (SINGLE, ["a", "b", "c"] * 10, ["a"] * 30, "f1_macro is not above {} (0.1667)"),
        (SINGLE, ["a", "b", "c"] * 10, ["b", "c", "a"] * 10, "f1_macro is not above {} (0.1667)"),
        (MULTI, [["a"], []] * 20, [["b", "c"]] * 40, "f1_macro is not above {} (0.6667)"),
        (NUMBER, [1.0, 5.0] * 20, [5.0, 1.0] * 20, "r2 is not above {} (0)"),
        (replace(NUMBER, primary="mae"), [1.0, 5.0] * 20, [5.0, 1.0] * 20, "mae is not below {} (2)"),
        (SPANS, [[("a", 0, 1)]] * 40, [[("a", 2, 3)]] * 40, "span_f1 is not above {} (0)"),
    ],
)
def test_a_score_is_not_better_than_a_constant(
    task: Task, truth: list[Any], predicted: list[Any], comparison: str
) -> None:
    warning = f"{comparison.format('that of the best constant prediction')}."
    for given, expected in ((predicted, [warning]), (truth, [])):
        statistics = statistics_of(task, truth, given)
        told = task_warnings(statistics, (), DecodingThresholds(), baselines({"t": statistics}))
        assert list(told) == expected


def test_a_prediction_that_is_not_finite() -> None:
    assert warned(Task("t", "regression"), [1.0] * 30, [2.0] * 29 + [float("inf")]) == [
        "Some predictions are not finite, so there is no metric."
    ]
