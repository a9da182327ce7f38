from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, r2_score, root_mean_squared_error

from hpo.evaluation.contributions import baselines, constant_predictions, scored
from hpo.extensions import METRICS, Extension
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Kind, Task
from hpo.training.metrics import RowStatistics, row_statistics

LABELS = ("a", "b", "c")
TEXT = "red blue green"


def statistics(task: Task, truth: list[Any], predicted: list[Any]) -> RowStatistics:
    """None: the row is not labelled. Spans are {name: [(start, end), ...]}."""
    rows = []
    for value in truth:
        labels = {} if value is None or KINDS[task.kind].in_spans else {task.name: value}
        annotated = frozenset([task.name] if value is not None else [])
        rows.append(Example("", TEXT, labels, value if isinstance(value, dict) else {}, annotated=annotated))
    return row_statistics(task, predicted, rows)


def drawn_classes(seed: int) -> list[str | None]:
    drawn = np.random.default_rng(seed).choice(["a", "b", "c", ""], 60, p=[0.2, 0.5, 0.2, 0.1])
    return [str(one) or None for one in drawn]


@pytest.mark.parametrize("seed", range(3))
def test_the_baseline_of_single_label_is_scikit_learns_most_frequent_class(seed: int) -> None:
    truth = drawn_classes(seed)
    found = baselines({"t": statistics(Task("t", "single_label", LABELS), truth, ["a"] * 60)})
    labelled = [one for one in truth if one]
    dummy = DummyClassifier(strategy="most_frequent").fit(labelled, labelled).predict(labelled)
    macro = f1_score(labelled, dummy, average="macro", zero_division=0)
    accuracy = accuracy_score(labelled, dummy)
    expected = {"t/f1_macro": macro, "t/f1_micro": accuracy, "t/accuracy": accuracy, "score": macro}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_the_baseline_of_a_regression_is_scikit_learns_mean_or_median(seed: int) -> None:
    truth = np.random.default_rng(seed).gamma(2, size=41)
    given = [*truth.tolist(), None]
    found = baselines({"t": statistics(Task("t", "regression", primary="rmse"), given, [0.0] * 42)})
    mean, median = (DummyRegressor(strategy=of).fit(truth, truth).predict(truth) for of in ("mean", "median"))
    rmse = root_mean_squared_error(truth, mean)
    expected = {"t/r2": r2_score(truth, mean), "t/mae": mean_absolute_error(truth, median), "t/rmse": rmse}
    assert found == pytest.approx(expected | {"score": rmse}, abs=1e-12)


def test_the_baseline_of_lists_fits_each_metric() -> None:
    """`a` in 6 of 10 rows, `b` in 4, `c` in 1; half of the rows have `a` alone."""
    truth = [["a"]] * 5 + [["a", "b"]] + [["b"]] * 2 + [["b", "c"]] + [[]]
    found = baselines({"t": statistics(Task("t", "multi_label", LABELS), truth, [[]] * 10)})
    every = np.mean([2 * 6 / 16, 2 * 4 / 14, 2 * 1 / 11])
    two = 2 * 10 / (11 + 20)
    one = 2 * 6 / (11 + 10)
    expected = {"t/f1_macro": every, "t/f1_micro": max(one, two), "t/exact_match": 0.5, "score": every}
    assert found == pytest.approx(expected)


def test_rows_without_a_class_have_a_perfect_baseline() -> None:
    found = baselines({"t": statistics(Task("t", "multi_label", LABELS), [[]] * 9, [["a"]] * 9)})
    assert set(found.values()) == {1.0}


def test_the_baseline_of_spans_is_no_span() -> None:
    none: dict[str, Any] = {}
    answers = [{"answer": [(0, 3)]}] * 3 + [none]
    found = baselines({"t": statistics(Task("t", "span_extraction", ("answer",)), answers, [[]] * 4)})
    assert found == {"t/span_f1": 0, "t/span_overlap_f1": 0.25, "t/exact_match": 0.25, "score": 0}
    places = [{"a": [(0, 3)], "b": [(4, 8)]}, none]
    for kind in ("token_classification", "span_per_label"):
        found = baselines({"t": statistics(Task("t", kind, LABELS), places, [[], []])})
        assert found == {"t/span_f1": 0, "t/span_overlap_f1": 0, "t/f1_macro": 0, "score": 0}


def test_the_score_is_the_mean_over_tasks_that_have_labelled_rows() -> None:
    truth = drawn_classes(0)
    tone = statistics(Task("tone", "single_label", LABELS, primary="accuracy"), truth, ["a"] * 60)
    stars = statistics(Task("stars", "regression"), [1.0, 2.0, 4.0] * 20, [0.0] * 60)
    empty = statistics(Task("empty", "single_label", LABELS), [None] * 60, ["a"] * 60)
    found = baselines({"tone": tone, "stars": stars, "empty": empty})
    assert found["score"] == pytest.approx(found["tone/accuracy"] / 2)
    assert not any(name.startswith("empty/") for name in found)
    assert baselines({"empty": empty}) == {}


def test_a_kind_without_a_constant_prediction_has_no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    tone = statistics(Task("tone", "single_label", LABELS), ["a", "b"], ["a", "a"])
    stars = statistics(Task("stars", "regression"), [1.0, 2.0], [0.0, 0.0])
    monkeypatch.setattr(KINDS["regression"], "constant_rows", Kind.constant_rows)
    assert set(baselines({"tone": tone, "stars": stars})) == {
        "tone/f1_macro",
        "tone/f1_micro",
        "tone/accuracy",
    }


def test_a_metric_of_own_code_leaves_the_other_baselines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Extension(lambda truths, predictions: float(truths == predictions), kinds=("single_label",))
    monkeypatch.setitem(METRICS, "own", own)
    given = {"t": statistics(Task("t", "single_label", LABELS), ["a", "b", "b"], ["a", "a", "b"])}
    assert set(baselines(given)) == {"t/f1_macro", "t/f1_micro", "t/accuracy", "score"}
    constant = constant_predictions(given, "t/accuracy")
    assert constant is not None
    run = scored(constant, "t/accuracy")
    assert run is not None
    assert run.value == pytest.approx(200 / 3)
