"""Row bounds, pseudo-values and baselines, against brute force and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, r2_score, root_mean_squared_error

from hpo.evaluation.contributions import baselines, perfect_statistics, rare_classes, scored, shuffled_value
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task, kind_of
from hpo.training.metrics import RowStatistics, row_statistics, score

CLASSES = ("a", "b", "c")


def examples(task: Task, truths: list[Any]) -> list[Example]:
    """Return rows of these truths; None: not labelled. Spans are {name: [(start, end), ...]}."""
    rows = []
    for n, truth in enumerate(truths):
        labels = {} if truth is None or KINDS[task.kind].in_spans else {task.name: truth}
        spans = truth if isinstance(truth, dict) else {}
        labelled = frozenset([task.name] if truth is not None else [])
        rows.append(Example(str(n), "one two three four", labels, spans, annotated=labelled))
    return rows


def statistics(task: Task, truths: list[Any], predicted: list[Any]) -> RowStatistics:
    return row_statistics(task, predicted, examples(task, truths))


def drawn(kind: str, num: int, seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Return truths, predictions, and the possible predictions of a row."""
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
        return [{"x": one} for one in truth], named, [[("x", *span) for span in one] for one in spans]
    truth = rng.normal(0, 1, num).tolist()
    return truth, [t + rng.normal(0, 0.3) for t in truth], [min(truth), max(truth), 0.0]


METRICS_OF = {
    "single_label": ("accuracy", "f1_micro", "f1_macro"),
    "multi_label": ("f1_macro", "f1_micro", "exact_match"),
    "token_classification": ("span_f1", "span_overlap_f1", "f1_macro"),
    "regression": ("r2", "mae", "rmse"),
}
CASES = [(kind, metric) for kind, metrics in METRICS_OF.items() for metric in metrics]


def task_of(kind: str, metric: str) -> Task:
    labels = {"token_classification": ("x",), "regression": ()}.get(kind, CLASSES)
    return Task("t", kind, labels, primary=metric)


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_no_row_changes_a_metric_by_more_than_its_bound(kind: str, metric: str) -> None:
    task = task_of(kind, metric)
    truths, predicted, others = drawn(kind, 60, 1)
    rows = examples(task, truths)
    found = row_statistics(task, predicted, rows)
    bound = kind_of(task).row_bound(metric, found.counts_NC, kind_of(task).bounded(found.values_N))
    whole = score(task, predicted, rows)[metric]
    changes = [
        abs(score(task, [*predicted[:n], other, *predicted[n + 1 :]], rows)[metric] - whole)
        for n in range(0, 60, 4)
        for other in others
    ]
    assert max(changes) * 60 <= bound * 1.001
    assert bound < 25 * max(changes) * 60, "far too wide"


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_contributions_have_the_mean_of_the_score(kind: str, metric: str) -> None:
    task = task_of(kind, metric)
    truths, predicted, _ = drawn(kind, 60, 0)
    rows = examples(task, truths)
    found = scored({"t": row_statistics(task, predicted, rows)}, f"t/{metric}")
    assert found is not None
    factor = -1 if metric in ("mae", "rmse") else 100
    assert found.value == pytest.approx(factor * score(task, predicted, rows)[metric])
    assert found.rows_N.mean() == pytest.approx(found.value)
    if metric in ("accuracy", "exact_match"):
        assert {round(value, 6) for value in found.rows_N} == {0.0, 100.0}


def test_pseudo_values_follow_the_jackknife() -> None:
    task = task_of("single_label", "f1_macro")
    truths, predicted, _ = drawn("single_label", 40, 2)
    found = scored({"t": statistics(task, truths, predicted)}, "t/f1_macro")
    assert found is not None
    whole = found.value
    without = [
        100
        * score(task, [*predicted[:n], *predicted[n + 1 :]], examples(task, truths[:n] + truths[n + 1 :]))[
            "f1_macro"
        ]
        for n in range(40)
    ]
    pseudo = np.array([40 * whole - 39 * value for value in without])
    assert found.rows_N == pytest.approx(pseudo - pseudo.mean() + whole)
    assert found.standard_error == pytest.approx(pseudo.std(ddof=1) / 40**0.5)


def test_a_task_with_few_labelled_rows_has_a_large_bound_in_the_score() -> None:
    """The first task has labels in 50 of 1,000 rows: each weighs 20 times as much there."""
    tasks = [Task(name, "single_label", CLASSES, primary="accuracy") for name in "tu"]
    labels = [{"u": "a", "t": "b"} if n < 50 else {"u": "a"} for n in range(1000)]
    rows = [Example(str(n), "text", one, {}, annotated=frozenset(one)) for n, one in enumerate(labels)]
    found = scored(perfect_statistics(tasks, rows), "score")
    assert found is not None
    assert (len(found.rows_N), found.value) == (1000, 100.0)
    assert found.row_bound == pytest.approx(100 * (20 + 1) / 2)


def test_errors_are_capped_at_the_range_of_the_labels() -> None:
    task = Task("t", "regression", primary="mae")
    far = scored({"t": statistics(task, [0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 2.0, 1e9])}, "t/mae")
    assert far is not None
    assert (far.value, far.row_bound) == (pytest.approx(-1.0), pytest.approx(4.0))
    one = scored({"t": statistics(Task("t", "single_label", CLASSES), ["a"], ["a"])}, "t/accuracy")
    assert one is not None
    assert one.standard_error == np.inf


def test_score_is_the_mean_over_tasks_with_labelled_rows() -> None:
    truth = drawn("single_label", 60, 0)[0]
    tone = statistics(Task("tone", "single_label", CLASSES, primary="accuracy"), truth, ["a"] * 60)
    stars = statistics(Task("stars", "regression"), [1.0, 2.0, 4.0] * 20, [0.0] * 60)
    empty = statistics(Task("empty", "single_label", CLASSES), [None] * 60, ["a"] * 60)
    found = baselines({"tone": tone, "stars": stars, "empty": empty})
    assert found["score"] == pytest.approx(found["tone/accuracy"] / 2)
    assert not any(name.startswith("empty/") for name in found)
    assert baselines({"empty": empty}) == {}


def test_predictions_in_random_order_have_the_expected_score() -> None:
    task = task_of("single_label", "f1_macro")
    truths, predicted, _ = drawn("single_label", 300, 5)
    rows, rng = examples(task, truths), np.random.default_rng(0)
    shuffled = [score(task, rng.permutation(predicted).tolist(), rows)["f1_macro"] for _ in range(50)]
    expected = shuffled_value({"t": row_statistics(task, predicted, rows)}, "t/f1_macro")
    assert expected == pytest.approx(100 * np.mean(shuffled), abs=1.5)
    assert shuffled_value({"t": statistics(task, ["a", "b"] * 4, ["a"] * 8)}, "t/accuracy") == 50
    lists = statistics(task_of("multi_label", "exact_match"), [["a"], []], [["a"], []])
    assert shuffled_value({"t": lists}, "t/exact_match") == -np.inf


# Baselines


def test_baseline_of_single_label_is_the_most_frequent_class() -> None:
    truth = [*drawn("single_label", 50, 0)[0], None, None]
    found = baselines({"t": statistics(Task("t", "single_label", CLASSES), truth, ["a"] * 52)})
    dummy = DummyClassifier(strategy="most_frequent").fit(truth[:50], truth[:50]).predict(truth[:50])
    macro = f1_score(truth[:50], dummy, average="macro", zero_division=0)
    accuracy = accuracy_score(truth[:50], dummy)
    expected = {"t/f1_macro": macro, "t/f1_micro": accuracy, "t/accuracy": accuracy, "score": macro}
    assert found == pytest.approx(expected)


def test_baseline_of_a_regression_is_the_mean_or_median() -> None:
    truth = np.random.default_rng(0).gamma(2, size=41)
    found = baselines({"t": statistics(Task("t", "regression", primary="rmse"), [*truth, None], [0.0] * 42)})
    mean, median = (DummyRegressor(strategy=of).fit(truth, truth).predict(truth) for of in ("mean", "median"))
    rmse = root_mean_squared_error(truth, mean)
    expected = {"t/r2": r2_score(truth, mean), "t/mae": mean_absolute_error(truth, median), "t/rmse": rmse}
    assert found == pytest.approx(expected | {"score": rmse}, abs=1e-12)


@pytest.mark.parametrize("metric", METRICS_OF["multi_label"])
def test_no_constant_list_of_classes_beats_the_baseline(metric: str) -> None:
    task = task_of("multi_label", metric)
    truths, predicted, lists = drawn("multi_label", 100, 3)
    rows = examples(task, truths)
    found = baselines({"t": row_statistics(task, predicted, rows)})
    best = max(score(task, [one] * 100, rows)[metric] for one in lists)
    assert found[f"t/{metric}"] == pytest.approx(best)


def test_baseline_of_spans_is_no_span() -> None:
    answers: list[Any] = [{"answer": [(0, 3)]}] * 3 + [{}]
    found = baselines({"t": statistics(Task("t", "span_extraction", ("answer",)), answers, [[]] * 4)})
    assert found == {"t/span_f1": 0, "t/span_overlap_f1": 0.25, "t/exact_match": 0.25, "score": 0}
    places = [{"a": [(0, 3)], "b": [(4, 8)]}, {}]
    for kind in ("token_classification", "span_per_label"):
        found = baselines({"t": statistics(Task("t", kind, CLASSES), places, [[], []])})
        assert found == {"t/span_f1": 0, "t/span_overlap_f1": 0, "t/f1_macro": 0, "score": 0}


def test_rare_classes_have_an_unknown_loss() -> None:
    """Class c has a third of the mean over classes with rows: 33.3 (1 - 0.025^(1/5)) = 17.39 points."""
    task = Task("t", "single_label", (*CLASSES, "d"), primary="f1_macro")
    found = perfect_statistics([task], examples(task, ["a"] * 600 + ["b"] * 395 + ["c"] * 5))
    assert rare_classes(found, "t/f1_macro", 17.3) == {"c": 5, "d": 0}
    assert rare_classes(found, "t/f1_macro", 17.5) == {"d": 0}
    assert rare_classes(found, "t/accuracy", 0.5) == {}
