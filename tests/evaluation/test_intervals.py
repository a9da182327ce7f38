from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import bootstrap

from hpo.data.examples import Example
from hpo.data.tasks import Task
from hpo.evaluation import intervals
from hpo.evaluation.intervals import Interval, difference_intervals, metric_intervals
from hpo.tasks.registry import KINDS
from hpo.training.metrics import RowStatistics, row_statistics

LABELS = ("a", "b", "c")
NUMBER = Task("t", "regression")
TEXT = "the quick brown fox jumps over the lazy dog"


def numbers(truth: Any, predicted: Any, missing: int = 0) -> dict[str, RowStatistics]:
    rows = [Example("", "x", {"t": float(y)}, {}, annotated=frozenset("t")) for y in truth]
    rows += [Example("", "x", {}, {})] * missing
    return {"t": row_statistics(NUMBER, [*map(float, predicted), *[0.0] * missing], rows)}


def random_rows(kind: str, rng: np.random.Generator, count: int) -> tuple[list[Any], list[Example]]:
    """Predictions that are right about half the time, and annotated rows."""

    def truth() -> Any:
        match kind:
            case "single_label":
                return str(rng.choice(LABELS))
            case "multi_label":
                return [label for label in LABELS if rng.random() < 0.4]
            case "regression":
                return float(rng.normal(5, 1))
        starts = rng.permutation([0, 4, 10, 16])[: 1 if kind == "span_extraction" else rng.integers(0, 4)]
        name = LABELS[0] if kind == "span_extraction" else None
        return [(name or str(rng.choice(LABELS)), int(s), int(s) + 3) for s in starts if rng.random() < 0.8]

    predictions, rows = [], []
    for _ in range(count):
        value = truth()
        predictions.append(value if rng.random() < 0.5 else truth())
        spans: dict[str, list[tuple[int, int]]] = {}
        if isinstance(value, list) and kind != "multi_label":
            for name, start, end in value:
                spans.setdefault(name, []).append((start, end))
        labels = {} if kind not in ("single_label", "multi_label", "regression") else {"t": value}
        annotated = frozenset("t") if rng.random() < 0.8 else frozenset()
        rows.append(Example("", TEXT, labels, spans, annotated=annotated))
    return predictions, rows


def macro_of_the_whole(whole: RowStatistics, drawn: RowStatistics) -> float:
    """The mean F1 of the classes that occur in the whole, one after another."""
    values = []
    for of_whole, of_drawn in zip(
        zip(*whole.class_counts(), strict=True), zip(*drawn.class_counts(), strict=True), strict=True
    ):
        hits, true, predicted = of_drawn if of_drawn[1] + of_drawn[2] else of_whole
        if of_whole[1] + of_whole[2]:
            values.append(2 * hits / (true + predicted))
    return float(np.mean(values))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weighted_score_is_that_of_the_rows_drawn(kind: str) -> None:
    task = Task("t", kind, LABELS[:1] if kind == "span_extraction" else LABELS)
    rng = np.random.default_rng(1)
    predictions, rows = random_rows(kind, rng, 25)
    weights_BE = rng.multinomial(25, np.full(25, 1 / 25), size=40).astype(float)
    weights_BE[0] = [float("t" not in row.annotated) for row in rows]
    found = row_statistics(task, predictions, rows).weighted_scores(weights_BE)
    assert set(found) == set(task.metrics)
    for b, weights_E in enumerate(weights_BE):
        drawn = np.repeat(np.arange(25), weights_E.astype(int))
        ours = row_statistics(task, [predictions[e] for e in drawn], [rows[e] for e in drawn])
        expected = ours.scores()
        if "f1_macro" in expected:
            expected["f1_macro"] = macro_of_the_whole(row_statistics(task, predictions, rows), ours)
        defined = {name: values[b] for name, values in found.items() if not np.isnan(values[b])}
        assert defined == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert bool(expected) == (b > 0)


def width(interval: Interval) -> float:
    assert interval.low is not None
    assert interval.high is not None
    return interval.high - interval.low


def test_the_interval_of_a_mean_is_scipys() -> None:
    errors = np.random.default_rng(2).gamma(2, size=80)
    found = metric_intervals(numbers(np.zeros(80), errors), num_resamples=9999).tasks["t"]["mae"]
    theirs = bootstrap((errors,), np.mean, method="percentile", n_resamples=9999, rng=3).confidence_interval
    assert found.value == pytest.approx(errors.mean())
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.03 * width(found))


def macro_f1(truth_RN: Any, predicted_RN: Any, axis: int) -> Any:
    """Of classes that all occur, as numbers."""
    of_classes = []
    for c in range(len(LABELS)):
        true, found = truth_RN == c, predicted_RN == c
        of_classes.append(2 * (true & found).sum(axis) / (true.sum(axis) + found.sum(axis)))
    return np.mean(of_classes, axis=0)


def test_the_interval_of_f1_is_scipys() -> None:
    rng = np.random.default_rng(9)
    truth, predicted = classes_drawn(rng, np.array([0.5, 0.3, 0.2]), np.array([0.9, 0.6, 0.4]), 120)
    found = metric_intervals({"t": classified(truth, predicted, 3)}, num_resamples=5000)
    ours = found.tasks["t"]["f1_macro"]
    given = {"paired": True, "method": "percentile", "n_resamples": 5000, "rng": 3}
    theirs = bootstrap((truth, predicted), macro_f1, **given).confidence_interval
    assert ours.value == pytest.approx(macro_f1(truth, predicted, 0))
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.03 * width(ours))


def classified(truth: Any, predicted: Any, num_classes: int) -> RowStatistics:
    task = Task("t", "single_label", tuple(f"c{c}" for c in range(num_classes)))
    rows = [Example("", "x", {"t": f"c{y}"}, {}, annotated=frozenset("t")) for y in truth]
    return row_statistics(task, [f"c{y}" for y in predicted], rows)


def classes_drawn(rng: np.random.Generator, share_C: Any, right_C: Any, count: int) -> tuple[Any, Any]:
    """Classes with these shares, and predictions right with these probabilities, else drawn by the shares."""
    truth = rng.choice(len(share_C), count, p=share_C)
    is_right = rng.random(count) < right_C[truth]
    return truth, np.where(is_right, truth, rng.choice(len(share_C), count, p=share_C))


def test_a_rare_class_that_is_missed_does_not_leave_the_mean() -> None:
    """50 classes of 20 rows that are right, and 50 of one row that are wrong."""
    truth = np.concatenate([np.repeat(np.arange(50), 20), np.arange(50, 100)])
    predicted = np.concatenate([truth[:1000], np.arange(50)])
    found = metric_intervals({"t": classified(truth, predicted, 100)}).tasks["t"]["f1_macro"]
    assert found.value == pytest.approx(0.5 * 40 / 41)
    assert found.low < found.value < found.high < 0.5


def test_an_interval_that_would_miss_its_value_is_extended_to_it() -> None:
    """300 classes of two rows, one of them right: in most resamples their mean F1 is lower."""
    truth = np.repeat(np.arange(300), 2)
    predicted = np.where(np.arange(600) % 2, np.roll(truth, 2), truth)
    found = metric_intervals({"t": classified(truth, predicted, 300)}).tasks["t"]["f1_macro"]
    assert found.low < found.high == found.value == 0.5


def test_the_score_is_resampled_with_all_tasks_together() -> None:
    """Two tasks with opposite errors: each moves, their mean does not."""
    rng = np.random.default_rng(5)
    is_right = rng.random(100) < 0.5
    tasks = [Task(name, "multi_label", ("a",)) for name in "uv"]
    rows = [Example("", "x", {"u": ["a"], "v": ["a"]}, {}, annotated=frozenset("uv"))] * 100
    statistics = {
        task.name: row_statistics(task, [["a"] if right else [] for right in side], rows)
        for task, side in zip(tasks, (is_right, ~is_right), strict=True)
    }
    found = metric_intervals(statistics)
    means = [found.tasks[name]["f1_macro"].value for name in "uv"]
    assert found.score is not None
    assert found.score.value == pytest.approx(np.mean(means))
    assert width(found.score) < 0.1 * width(found.tasks["u"]["f1_macro"])


def test_a_paired_difference_is_narrower_than_its_sides() -> None:
    rng = np.random.default_rng(6)
    error, worse = rng.gamma(2, size=200), rng.random(200) * 0.01
    ours, theirs = numbers(np.zeros(200), error + worse), numbers(np.zeros(200), error)
    found = difference_intervals(ours, theirs).tasks["t"]["mae"]
    assert found.value == pytest.approx(worse.mean())
    assert 0 < found.low < worse.mean() < found.high
    assert width(found) < 0.02 * width(metric_intervals(ours).tasks["t"]["mae"])
    same = difference_intervals(theirs, theirs)
    assert {(one.value, one.low, one.high) for one in same.tasks["t"].values()} == {(0.0, 0.0, 0.0)}
    assert same.score is not None
    assert width(same.score) == 0


def test_a_paired_difference_needs_the_same_examples() -> None:
    ours = numbers([1, 2], [1, 2])
    with pytest.raises(ValueError, match="the same annotated examples of task t"):
        difference_intervals(ours, numbers([1, 2], [1, 2], missing=1))
    with pytest.raises(ValueError, match=r"the same tasks, but got \['t'\] and \[\]"):
        difference_intervals(ours, {})


def test_pieces_of_the_resamples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    statistics = numbers(*rng.normal(size=(2, 50)), missing=5)
    whole = metric_intervals(statistics, num_resamples=100).tasks["t"]["mae"]
    monkeypatch.setattr(intervals, "_WEIGHTS_AT_ONCE", 55 * 7)
    pieces = metric_intervals(statistics, num_resamples=100).tasks["t"]["mae"]
    assert (pieces.low, pieces.high) == pytest.approx((whole.low, whole.high), rel=1e-12)


def test_few_rows_have_intervals_without_nan() -> None:
    one = metric_intervals(numbers([1.0], [3.0]))
    assert {name: (i.value, i.low, i.high) for name, i in one.tasks["t"].items()} == {
        "mae": (2, None, None),
        "rmse": (2, None, None),
    }
    assert one.score is None
    # Most resamples of 40 examples hold no annotated row at all, or only one of the two.
    few = metric_intervals(numbers([1.0, 2.0], [1.0, 3.0], missing=38))
    assert np.isfinite([bound for i in few.tasks["t"].values() for bound in (i.low, i.high)]).all()
    assert few.tasks["t"]["mae"].low == 0.0
    assert metric_intervals(numbers([], [])).tasks == {"t": {}}
    assert metric_intervals(numbers([], [], missing=3)).tasks == {"t": {}}
    assert metric_intervals({}).score is None


def test_the_centre_of_the_targets_does_not_matter() -> None:
    truth, predicted = np.random.default_rng(8).normal(size=(2, 40))
    near, far = numbers(truth, predicted), numbers(truth + 1e6, predicted + 1e6)
    ours, theirs = (metric_intervals(side, num_resamples=50).tasks["t"]["r2"] for side in (near, far))
    assert (ours.value, ours.low, ours.high) == pytest.approx(
        (theirs.value, theirs.low, theirs.high), abs=1e-8
    )
    constant = metric_intervals(numbers([0.1] * 7, [0.1] * 6 + [0.2])).tasks["t"]["r2"]
    assert (constant.value, constant.low, constant.high) == (0, 0, 1)
