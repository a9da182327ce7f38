"""Row bounds and baselines against brute force: one row is changed to every other prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier
from sklearn.metrics import f1_score

from hpo.evaluation.contributions import (
    constant_predictions,
    perfect_statistics,
    rare_classes,
    scored,
    shuffled_value,
)
from hpo.tasks.example import Example
from hpo.tasks.kind import Task, kind_of
from hpo.training.metrics import row_statistics, score

CLASSES = ("a", "b", "c")


def examples(task: Task, truths: list[Any]) -> list[Example]:
    labelled = frozenset([task.name])
    if task.kind == "token_classification":
        return [
            Example(str(n), "one two three four", {}, {"x": truth}, annotated=labelled)
            for n, truth in enumerate(truths)
        ]
    return [
        Example(str(n), "text", {task.name: truth}, {}, annotated=labelled) for n, truth in enumerate(truths)
    ]


def drawn(kind: str, num: int, seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Truths, predictions, and the predictions that a row may have instead."""
    rng = np.random.default_rng(seed)
    if kind == "single_label":
        truth = rng.choice(CLASSES, num, p=[0.6, 0.3, 0.1]).tolist()
        return truth, [t if rng.random() < 0.8 else rng.choice(CLASSES) for t in truth], [*CLASSES]
    if kind == "multi_label":
        lists = [[], ["a"], ["b"], ["c"], ["a", "b"], ["a", "c"], ["b", "c"], ["a", "b", "c"]]
        truth = [lists[k] for k in rng.integers(0, 5, num)]
        return truth, [t if rng.random() < 0.8 else lists[rng.integers(0, 8)] for t in truth], lists
    if kind == "token_classification":
        spans: list[Any] = [[], [(0, 3)], [(4, 7)], [(0, 3), (4, 7)]]
        truth = [spans[k] for k in rng.integers(0, 4, num)]
        given = [t if rng.random() < 0.8 else spans[rng.integers(0, 4)] for t in truth]
        named = [[("x", *span) for span in spans_] for spans_ in given]
        return truth, named, [[("x", *span) for span in one] for one in spans]
    truth = rng.normal(0, 1, num).tolist()
    return truth, [t + rng.normal(0, 0.3) for t in truth], [min(truth), max(truth), 0.0]


CASES = [
    ("single_label", "accuracy"),
    ("single_label", "f1_micro"),
    ("single_label", "f1_macro"),
    ("multi_label", "f1_macro"),
    ("multi_label", "f1_micro"),
    ("multi_label", "exact_match"),
    ("token_classification", "span_f1"),
    ("token_classification", "span_overlap_f1"),
    ("token_classification", "f1_macro"),
    ("regression", "r2"),
    ("regression", "mae"),
    ("regression", "rmse"),
]


def task_of(kind: str, metric: str) -> Task:
    labels = {"token_classification": ("x",), "regression": ()}.get(kind, CLASSES)
    return Task("t", kind, labels, primary=metric)


@pytest.mark.parametrize(("kind", "metric"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_row_changes_a_metric_by_more_than_its_bound(kind: str, metric: str, seed: int) -> None:
    task = task_of(kind, metric)
    truths, predicted, others = drawn(kind, 60, seed)
    rows = examples(task, truths)
    found = row_statistics(task, predicted, rows)
    kind_ = kind_of(task)
    bound = kind_.row_bound(metric, found.counts_NC, kind_.bounded(found.values_N))
    whole = score(task, predicted, rows)[metric]
    changes = [
        abs(score(task, [*predicted[:n], other, *predicted[n + 1 :]], rows)[metric] - whole)
        for n in range(0, 60, 4)
        for other in others
    ]
    assert max(changes) * 60 <= bound * 1.001
    assert bound < 25 * max(changes) * 60, "far too wide"


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_the_contributions_have_the_mean_of_the_score(kind: str, metric: str) -> None:
    task = task_of(kind, metric)
    truths, predicted, _ = drawn(kind, 60, 0)
    rows = examples(task, truths)
    found = scored({"t": row_statistics(task, predicted, rows)}, f"t/{metric}")
    assert found is not None
    factor = -1 if metric in ("mae", "rmse") else 100
    assert found.value == pytest.approx(factor * score(task, predicted, rows)[metric])
    assert found.rows_N.mean() == pytest.approx(found.value)
    if metric in ("accuracy", "exact_match"):
        assert {round(value, 6) for value in found.rows_N} <= {0.0, 100.0}


def test_a_task_with_few_labelled_rows_has_a_large_bound_in_the_score() -> None:
    """Of 1,000 rows, 50 are labelled for the first task: each weighs 20 times as much there."""
    tasks = [
        Task(name, "single_label", CASES_, primary="accuracy")
        for name, CASES_ in (("t", CLASSES), ("u", CLASSES))
    ]
    labels = [{"u": "a", "t": "b"} if n < 50 else {"u": "a"} for n in range(1000)]
    rows = [Example(str(n), "text", one, {}, annotated=frozenset(one)) for n, one in enumerate(labels)]
    found = scored(perfect_statistics(tasks, rows), "score")
    assert found is not None
    assert (len(found.rows_N), found.value) == (1000, 100.0)
    assert found.row_bound == pytest.approx(100 * (20 + 1) / 2)


def test_errors_beyond_the_range_of_the_labels_count_as_that_range() -> None:
    task = Task("t", "regression", primary="mae")
    rows = examples(task, [0.0, 1.0, 2.0, 4.0])
    far = scored({"t": row_statistics(task, [0.0, 1.0, 2.0, 1e9], rows)}, "t/mae")
    assert far is not None
    assert far.value == pytest.approx(-1.0)


@pytest.mark.parametrize("metric", ["accuracy", "f1_macro"])
def test_the_baseline_of_classes_is_that_of_a_dummy_classifier(metric: str) -> None:
    task = task_of("single_label", metric)
    truths, predicted, _ = drawn("single_label", 100, 3)
    found = constant_predictions(
        {"t": row_statistics(task, predicted, examples(task, truths))}, f"t/{metric}"
    )
    assert found is not None
    dummy = DummyClassifier(strategy="most_frequent").fit(np.zeros((100, 1)), truths)
    constant = dummy.predict(np.zeros((100, 1)))
    expected = (
        np.mean(constant == truths) if metric == "accuracy" else f1_score(truths, constant, average="macro")
    )
    assert found["t"].scores()[metric] == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["f1_macro", "f1_micro", "exact_match"])
def test_no_constant_list_of_classes_beats_the_baseline(metric: str) -> None:
    task = task_of("multi_label", metric)
    truths, predicted, lists = drawn("multi_label", 100, 3)
    rows = examples(task, truths)
    found = constant_predictions({"t": row_statistics(task, predicted, rows)}, f"t/{metric}")
    assert found is not None
    best = max(score(task, [one] * 100, rows)[metric] for one in lists)
    assert found["t"].scores()[metric] == pytest.approx(best)


@pytest.mark.parametrize(("metric", "center"), [("mae", np.median), ("rmse", np.mean), ("r2", np.mean)])
def test_the_baseline_of_numbers_is_their_center(metric: str, center: Any) -> None:
    task = task_of("regression", metric)
    truths = np.random.default_rng(0).exponential(1, 99).tolist()
    rows = examples(task, truths)
    found = constant_predictions(perfect_statistics([task], rows), f"t/{metric}")
    assert found is not None
    expected = score(task, [float(center(truths))] * 99, rows)[metric]
    assert found["t"].scores()[metric] == pytest.approx(expected, abs=1e-9)


def test_predictions_in_random_order_have_the_expected_score() -> None:
    task = task_of("single_label", "f1_macro")
    truths, predicted, _ = drawn("single_label", 300, 5)
    rows, rng = examples(task, truths), np.random.default_rng(0)
    shuffled = [score(task, rng.permutation(predicted).tolist(), rows)["f1_macro"] for _ in range(50)]
    expected = shuffled_value({"t": row_statistics(task, predicted, rows)}, "t/f1_macro")
    assert expected == pytest.approx(100 * np.mean(shuffled), abs=1.5)


def test_rare_classes_are_those_with_an_unknown_loss() -> None:
    task = Task("t", "single_label", CLASSES, primary="f1_macro")
    rows = examples(task, ["a"] * 600 + ["b"] * 395 + ["c"] * 5)
    found = perfect_statistics([task], rows)
    assert rare_classes(found, "t/f1_macro", 0.5) == {"c": 5}
    assert rare_classes(found, "t/f1_macro", 40.0) == {}
    assert rare_classes(found, "t/accuracy", 0.5) == {}
