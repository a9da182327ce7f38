"""Row bounds, pseudo-values and baselines, against brute force and scikit-learn."""

from typing import Any

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, r2_score, root_mean_squared_error
from support.labelled_rows import CLASSES, LISTS, random_rows, rows_of, statistics_of

from hpo.evaluation.contributions import baselines, perfect_statistics, rare_classes, scored, shuffled_value
from hpo.evaluation.decision import excludable_loss
from hpo.tasks.example import Example
from hpo.tasks.kind import Task, kind_of
from hpo.training.metrics import score

METRICS_OF = {
    "single_label": ("accuracy", "f1_micro", "f1_macro"),
    "multi_label": ("f1_macro", "f1_micro", "exact_match"),
    "token_classification": ("span_f1", "span_overlap_f1", "f1_macro"),
    "regression": ("r2", "mae", "rmse"),
}
CASES = [(kind, metric) for kind, metrics in METRICS_OF.items() for metric in metrics]


OTHERS: dict[str, list[Any]] = {
    "single_label": [*CLASSES],
    "multi_label": LISTS,
    "token_classification": [[], [("a", 0, 3)], [("b", 0, 3), ("b", 10, 13)], [("c", 4, 7)]],
    "regression": [0.0, 5.0, 10.0],
}
"""Predictions of a row."""


def task_of(kind: str, metric: str) -> Task:
    return Task("t", kind, () if kind == "regression" else CLASSES, primary=metric)


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_no_row_changes_a_metric_by_more_than_its_bound(kind: str, metric: str) -> None:
    task = task_of(kind, metric)
    truths, predicted = random_rows(kind, 60, 1)
    rows = rows_of(task, truths)
    found = statistics_of(task, truths, predicted)
    bound = kind_of(task).row_bound(metric, found.counts_NC, kind_of(task).bounded(found.values_N))
    whole = score(task, predicted, rows)[metric]
    bound_N = np.broadcast_to(bound, 60)
    is_list = isinstance(truths[0], list)
    surplus = (
        max(len(one) - len(truth) for one, truth in zip(predicted, truths, strict=True)) if is_list else 9
    )
    changes = {
        n: max(
            abs(score(task, [*predicted[:n], other, *predicted[n + 1 :]], rows)[metric] - whole)
            for other in OTHERS[kind]
            if not is_list or len(other) - len(truths[n]) <= surplus  # the stated assumption
        )
        for n in range(0, 60, 4)
    }
    assert all(change * 60 <= bound_N[n] * 1.001 for n, change in changes.items())
    assert bound_N.max() < 25 * max(changes.values()) * 60, "far too wide"


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_contributions_have_the_mean_of_the_score(kind: str, metric: str) -> None:
    task = task_of(kind, metric)
    truths, predicted = random_rows(kind, 60, 0)
    found = scored({"t": statistics_of(task, truths, predicted)}, f"t/{metric}")
    factor = -1 if metric in ("mae", "rmse") else 100
    assert found.value == pytest.approx(factor * score(task, predicted, rows_of(task, truths))[metric])
    assert found.groups_G.mean() == pytest.approx(found.value)
    if metric in ("accuracy", "exact_match"):
        assert {round(value, 6) for value in found.groups_G} == {0.0, 100.0}


def test_pseudo_values_follow_the_jackknife() -> None:
    task = task_of("single_label", "f1_macro")
    truths, predicted = random_rows("single_label", 40, 2)
    found = scored({"t": statistics_of(task, truths, predicted)}, "t/f1_macro")
    rows = rows_of(task, truths)
    without = [
        score(task, [*predicted[:n], *predicted[n + 1 :]], [*rows[:n], *rows[n + 1 :]])["f1_macro"]
        for n in range(40)
    ]
    pseudo = 40 * found.value - 39 * 100 * np.array(without)
    assert found.groups_G == pytest.approx(pseudo - pseudo.mean() + found.value)
    assert found.standard_error == pytest.approx(pseudo.std(ddof=1) / 40**0.5)


def test_a_task_with_few_labelled_rows_has_a_large_bound_in_the_score() -> None:
    """The first task has labels in 50 of 1,000 rows: each weighs 20 times as much there."""
    tasks = [Task(name, "single_label", CLASSES, primary="accuracy") for name in "tu"]
    labels = [{"u": "a", "t": "b"} if n < 50 else {"u": "a"} for n in range(1000)]
    rows = [Example(str(n), "text", one, {}, annotated=frozenset(one)) for n, one in enumerate(labels)]
    found = scored(perfect_statistics(tasks, rows), "score")
    assert (found.num_rows, len(found.groups_G), found.value) == (1000, 1000, 100.0)
    assert found.bounds_G.max() == pytest.approx(100 * (20 + 1) / 2)
    assert found.bounds_G.min() == pytest.approx(100 / 2)


def test_errors_are_capped_at_the_range_of_the_labels() -> None:
    task = Task("t", "regression", primary="mae")
    far = scored({"t": statistics_of(task, [0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 2.0, 1e9])}, "t/mae")
    assert (far.value, far.row_bound) == (pytest.approx(-1.0), pytest.approx(4.0))
    one = scored({"t": statistics_of(Task("t", "single_label", CLASSES), ["a"], ["a"])}, "t/accuracy")
    assert one.standard_error == np.inf


def test_score_is_the_mean_over_tasks_with_labelled_rows() -> None:
    truth = random_rows("single_label", 60, 0)[0]
    tone = statistics_of(Task("tone", "single_label", CLASSES, primary="accuracy"), truth, ["a"] * 60)
    stars = statistics_of(Task("stars", "regression"), [1.0, 2.0, 4.0] * 20, [0.0] * 60)
    empty = statistics_of(Task("empty", "single_label", CLASSES), [None] * 60, ["a"] * 60)
    found = baselines({"tone": tone, "stars": stars, "empty": empty})
    assert found["score"] == pytest.approx(found["tone/accuracy"] / 2)
    assert not any(name.startswith("empty/") for name in found)
    assert baselines({"empty": empty}) == {}


def test_predictions_in_random_order_have_the_expected_score() -> None:
    task = task_of("single_label", "f1_macro")
    truths, predicted = random_rows("single_label", 300, 5)
    rows, rng = rows_of(task, truths), np.random.default_rng(0)
    shuffled = [score(task, rng.permutation(predicted).tolist(), rows)["f1_macro"] for _ in range(50)]
    expected = shuffled_value({"t": statistics_of(task, truths, predicted)}, "t/f1_macro")
    assert expected == pytest.approx(100 * np.mean(shuffled), abs=1.5)
    assert shuffled_value({"t": statistics_of(task, ["a", "b"] * 4, ["a"] * 8)}, "t/accuracy") == 50
    lists = statistics_of(task_of("multi_label", "exact_match"), [["a"], []], [["a"], []])
    assert shuffled_value({"t": lists}, "t/exact_match") == -np.inf


# Baselines


def test_baseline_of_single_label_is_the_most_frequent_class() -> None:
    truth = [*random_rows("single_label", 50, 0)[0], None, None]
    found = baselines({"t": statistics_of(Task("t", "single_label", CLASSES), truth, ["a"] * 52)})
    dummy = DummyClassifier(strategy="most_frequent").fit(truth[:50], truth[:50]).predict(truth[:50])
    macro = f1_score(truth[:50], dummy, average="macro", zero_division=0)
    accuracy = accuracy_score(truth[:50], dummy)
    expected = {"t/f1_macro": macro, "t/f1_micro": accuracy, "t/accuracy": accuracy, "score": macro}
    expected |= {"t/matthews_corrcoef": 0.0, "t/quadratic_kappa": 0.0}
    assert found == pytest.approx(expected)


def test_baseline_of_a_regression_is_the_mean_or_median() -> None:
    truth = np.random.default_rng(0).gamma(2, size=41)
    task = Task("t", "regression", primary="rmse")
    found = baselines({"t": statistics_of(task, [*truth, None], [0.0] * 42)})
    mean, median = (DummyRegressor(strategy=of).fit(truth, truth).predict(truth) for of in ("mean", "median"))
    rmse = root_mean_squared_error(truth, mean)
    expected = {"t/r2": r2_score(truth, mean), "t/mae": mean_absolute_error(truth, median), "t/rmse": rmse}
    assert found == pytest.approx(expected | {"score": rmse}, abs=1e-12)


@pytest.mark.parametrize("metric", METRICS_OF["multi_label"])
def test_no_constant_list_of_classes_beats_the_baseline(metric: str) -> None:
    task = task_of("multi_label", metric)
    truths, predicted = random_rows("multi_label", 100, 3)
    found = baselines({"t": statistics_of(task, truths, predicted)})
    best = max(score(task, [one] * 100, rows_of(task, truths))[metric] for one in LISTS)
    assert found[f"t/{metric}"] == pytest.approx(best)


def test_baseline_of_spans_is_no_span() -> None:
    answers: list[Any] = [[("answer", 0, 3)]] * 3 + [[]]
    found = baselines({"t": statistics_of(Task("t", "span_extraction", ("answer",)), answers, [[]] * 4)})
    assert found == {"t/span_f1": 0, "t/span_overlap_f1": 0.25, "t/exact_match": 0.25, "score": 0}
    places = [[("a", 0, 3), ("b", 4, 8)], []]
    for kind in ("token_classification", "span_per_label"):
        found = baselines({"t": statistics_of(Task("t", kind, CLASSES), places, [[], []])})
        assert found == {"t/span_f1": 0, "t/span_overlap_f1": 0, "t/f1_macro": 0, "score": 0}


def test_rare_classes_have_an_unknown_loss() -> None:
    """Class c has a quarter of the mean over classes with rows: 25 (1 - 0.025^(1/5)) = 13.05 points."""
    task = Task("t", "single_label", (*CLASSES, "d", "e"), primary="f1_macro")
    found = perfect_statistics([task], rows_of(task, ["a"] * 600 + ["b"] * 394 + ["c"] * 5 + ["d"]))
    lost = excludable_loss(25.0, 5)
    assert lost == pytest.approx(13.05, abs=0.01)
    assert rare_classes(found, "t/f1_macro", lost) == {"c": 5, "d": 1, "e": 0}
    assert rare_classes(found, "t/f1_macro", lost + 0.1) == {"d": 1, "e": 0}
    assert rare_classes(found, "t/accuracy", 0.5) == {}
