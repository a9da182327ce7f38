"""Figures of classes and confusion against scikit-learn; counts of spans: `test_metrics`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from hpo.evaluation.classes import class_figures, confusion
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.training.metrics import RowStatistics, row_statistics

NAMES = ("a", "b", "c", "d", "e")
NUM_CASES = 100


def labelled(*values: Any) -> list[Example]:
    return [Example("", "x", {"t": value}, {}, annotated=frozenset("t")) for value in values]


def check_classes(statistics: RowStatistics, truth: Any, predicted: Any, labels: Any) -> None:
    reference = precision_recall_fscore_support(
        truth, predicted, labels=labels, average=None, zero_division=0
    )
    found = class_figures(statistics)
    assert [one.name for one in found] == list(statistics.task.labels)
    for one, precision, recall, f1, support in zip(found, *reference, strict=True):
        assert one.support == support
        if one.support + one.num_predicted:
            assert (one.precision, one.recall, one.f1) == pytest.approx((precision, recall, f1), rel=1e-12)
        else:
            assert (one.precision, one.recall, one.f1) == (None, None, None)


def test_single_label_figures_are_scikit_learns() -> None:
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        labels = NAMES[: rng.integers(2, 6)]
        # Some classes are never true, others never predicted.
        truth = rng.choice(labels[: rng.integers(1, 6)], rng.integers(1, 40)).tolist()
        predicted = rng.choice(labels[-int(rng.integers(1, 6)) :], len(truth)).tolist()
        task = Task("t", "single_label", labels)
        statistics = row_statistics(task, predicted, labelled(*truth))
        check_classes(statistics, truth, predicted, labels)
        matrix = np.zeros((len(labels), len(labels)), int)
        found = confusion(statistics)
        assert found is not None
        assert found.labels == labels
        for true, other, count in found.counts:
            matrix[true, other] = count
        assert all(count > 0 for _, _, count in found.counts)
        assert (matrix == confusion_matrix(truth, predicted, labels=labels)).all()


def test_multi_label_figures_are_scikit_learns() -> None:
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        labels = NAMES[: rng.integers(2, 6)]  # of one column scikit-learn makes a binary label
        shape = (int(rng.integers(1, 40)), len(labels))
        truth_NC, predicted_NC = (rng.random(shape) < rng.random(len(labels)) ** 2 for _ in range(2))
        truth, predicted = (
            [[labels[c] for c in np.flatnonzero(row)] for row in side] for side in (truth_NC, predicted_NC)
        )
        task = Task("t", "multi_label", labels)
        statistics = row_statistics(task, predicted, labelled(*truth))
        check_classes(statistics, truth_NC, predicted_NC, range(len(labels)))
        found = confusion(statistics)
        assert found is not None
        together = {(t, p): n for t, p, n in found.counts}
        for t in range(len(labels)):
            for p in range(len(labels)):
                assert together.get((t, p), 0) == (truth_NC[:, t] & predicted_NC[:, p]).sum()


def test_answers_count_by_what_is_accepted() -> None:
    task = Task("t", "span_extraction", ("answer",))
    row = Example(
        "",
        "one two three",
        {},
        {"answer": [(0, 3)]},
        alt_spans={"answer": [(0, 3), (4, 7)]},
        annotated=frozenset("t"),
    )
    none = Example("", "one two", {}, {}, annotated=frozenset("t"))
    found = [[("answer", 4, 7)], [("answer", 0, 3)], [("answer", 8, 13)], []]
    (figures,) = class_figures(row_statistics(task, found, [row, none, row, none]))
    assert (figures.precision, figures.recall, figures.f1) == pytest.approx((1 / 3, 1 / 2, 2 / 5))
    assert (figures.support, figures.num_predicted) == (2, 3)
