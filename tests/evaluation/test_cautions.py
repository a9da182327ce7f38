from __future__ import annotations

from typing import Any

import pytest

from hpo.evaluation.detailed import class_figures, task_warnings
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.tasks.options import DecodingThresholds
from hpo.training.metrics import RowStatistics, row_statistics

SINGLE = Task("t", "single_label", ("a", "b", "c"))
MULTI = Task("t", "multi_label", ("a", "b", "c"))
NUMBER = Task("t", "regression")
SLOTS = Task("t", "token_classification", ("a", "b"))
ANSWER = Task("t", "span_extraction", ("answer",))
SETS: list[Any] = [["a"], ["b"], ["c"], []] * 20
ANSWERS: list[Any] = [[("answer", 0, 1)], []] * 20


def statistics_of(task: Task, truth: list[Any], predicted: list[Any]) -> RowStatistics:
    """Return statistics of rows. A span is given as one span per row, or none."""
    rows = []
    for label in truth:
        is_label = task.kind in ("single_label", "multi_label", "regression")
        spans = {} if is_label or not label else {label[0][0]: [label[0][1:]]}
        rows.append(Example("", "a text", {"t": label}, spans, annotated=frozenset("t")))
    return row_statistics(task, predicted, rows)


@pytest.mark.parametrize(
    ("task", "truth", "predicted", "threshold", "expected"),
    [
        (SINGLE, ["a", "b", "c"] * 20, ["b", "c", "a"] * 20, 0.5, []),
        (MULTI, SETS, SETS[1:] + SETS[:1], 0.5, []),
        (MULTI, [["a", "b", "c"]] * 40, [["a", "b", "c"]] * 40, 0.5, []),
        (
            MULTI,
            SETS,
            [["a", "b", "c"]] * 80,
            0.0009,
            ["Predicted in every row at the threshold 0.0009: `a`, `b`, `c`."],
        ),
        (SINGLE, ["a", "b", "c"] * 20, ["a"] * 60, 0.5, ["Never predicted: `b`, `c`.", "Predicted in every"]),
        (SLOTS, [[("a", 0, 1)], [("b", 0, 1)]] * 20, [[("a", 0, 1)]] * 40, 0.5, ["Never predicted: `b`."]),
        (ANSWER, ANSWERS, [[("answer", 0, 1)]] * 40, 0.5, ["Predicted in every row at the null offset 0"]),
        (
            SINGLE,
            ["a", "b"] * 5,
            ["b", "a"] * 5,
            0.5,
            ["Labelled rows: only 10,", "Fewer than 10 rows: `a`, `b`.", "Not in this split: `c`."],
        ),
        (SINGLE, [], [], 0.5, ["No row of this split is labelled for t."]),
        (
            Task("t", "single_label", tuple("abcdefgh")),
            ["a"] * 30,
            ["a"] * 30,
            0.5,
            ["Not in this split: `b`, `c`, `d`, `e`, `f` and 2 more."],
        ),
        (NUMBER, [1.0] * 30, [2.0] * 29 + [float("inf")], 0.5, ["Some predictions are not finite"]),
    ],
)
def test_warnings_about_a_task(
    task: Task, truth: list[Any], predicted: list[Any], threshold: float, expected: list[str]
) -> None:
    statistics = statistics_of(task, truth, predicted)
    warnings = task_warnings(statistics, class_figures(statistics), DecodingThresholds(threshold), {})
    assert len(warnings) == len(expected)
    for warning, beginning in zip(warnings, expected, strict=True):
        assert warning.startswith(beginning)
