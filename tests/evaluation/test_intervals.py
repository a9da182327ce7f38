import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, bootstrap
from sklearn.metrics import average_precision_score, roc_auc_score
from support.labelled_rows import CLASSES, random_rows, rows_of, statistics_of

from hpo.evaluation import intervals
from hpo.evaluation.intervals import metric_intervals
from hpo.evaluation.record import Interval
from hpo.extensions import METRICS, Extension
from hpo.tasks.kind import KINDS, Task
from hpo.tasks.sums import macro_f1_change
from hpo.training.metrics import RowStatistics, row_statistics

NUMBER = Task("t", "regression")
SINGLE = Task("t", "single_label", ("a", "b"))
MULTI = Task("t", "multi_label", ("a", "b"))
ANSWER = Task("t", "span_extraction", ("answer",))


def numbers(truth: Any, predicted: Any, missing: int = 0) -> dict[str, RowStatistics]:
    truths = [*map(float, truth), *[None] * missing]
    return {"t": statistics_of(NUMBER, truths, [*map(float, predicted), *[0.0] * missing])}


def ends(task: Task, metric: str, truth: Any, predicted: Any) -> Any:
    interval = metric_intervals({"t": statistics_of(task, truth, predicted)}).tasks["t"][metric]
    return interval.low, interval.high


def width(interval: Interval) -> float:
    return interval.high - interval.low


def macro_of_the_whole(whole: RowStatistics, drawn: RowStatistics) -> float:
    """Return the mean F1 of the classes in the whole; a missing class keeps its F1 of the whole."""
    of_whole, of_drawn = np.array(whole.class_counts()), np.array(drawn.class_counts())
    counts = np.where(of_drawn[1:].any(axis=0), of_drawn, of_whole)
    hits, true, predicted = counts[:, of_whole[1:].any(axis=0)]
    return float(np.mean(2 * hits / (true + predicted)))


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_scores_equal_scores_of_drawn_rows(kind: str) -> None:
    task = Task("t", kind, CLASSES[:1] if kind == "span_extraction" else CLASSES)
    rng = np.random.default_rng(1)
    truths, predictions = random_rows(kind, 25, 1)
    truths = [truth if rng.random() < 0.8 else None for truth in truths]
    rows = rows_of(task, truths)
    weights_BE = rng.multinomial(25, np.full(25, 1 / 25), size=40).astype(float)
    weights_BE[0] = [float(truth is None) for truth in truths]
    p_EC = rng.dirichlet(np.ones(3), 25).round(1) if KINDS[kind].has_classes else None
    whole = row_statistics(task, predictions, rows, None, p_EC)
    found = whole.weighted_scores(weights_BE)
    assert set(found) == set(task.metrics)
    for b, weights_E in enumerate(weights_BE):
        drawn = np.repeat(np.arange(25), weights_E.astype(int))
        likely = p_EC if p_EC is None else p_EC[drawn]
        ours = row_statistics(task, [predictions[e] for e in drawn], [rows[e] for e in drawn], None, likely)
        expected = ours.scores()
        if "f1_macro" in expected:
            expected["f1_macro"] = macro_of_the_whole(whole, ours)
        defined = {name: values[b] for name, values in found.items() if not np.isnan(values[b])}
        assert defined == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert bool(expected) == (b > 0)


def test_a_class_without_rows_in_a_resample_keeps_its_area() -> None:
    task, p_NC = Task("t", "single_label", CLASSES), np.random.default_rng(0).dirichlet(np.ones(3), 9)
    truths = [*"aaabbbccc"]
    whole = row_statistics(task, truths, rows_of(task, truths), None, p_NC)
    weights_N = np.array([1, 2, 1, 0, 1, 3, 0, 0, 0])
    for name, function in (("roc_auc", roc_auc_score), ("average_precision", average_precision_score)):
        of_class = [np.equal(truths, label) for label in CLASSES]
        drawn = [function(of_class[c], p_NC[:, c], sample_weight=weights_N) for c in range(2)]
        expected = np.mean([*drawn, function(of_class[2], p_NC[:, 2])])
        assert whole.weighted_scores(weights_N[None])[f"{name}_macro"] == pytest.approx(expected)
    left_out = whole.scores_without_each("roc_auc_macro")
    others = [whole.weighted_scores(1.0 - np.eye(9)[n : n + 1])["roc_auc_macro"][0] for n in range(9)]
    assert left_out == pytest.approx(others)


def test_interval_of_a_mean_is_scipys() -> None:
    errors = np.random.default_rng(2).gamma(2, size=80)
    found = metric_intervals(numbers(np.zeros(80), errors), num_resamples=9999).tasks["t"]["mae"]
    theirs = bootstrap((errors,), np.mean, method="percentile", n_resamples=9999, rng=3).confidence_interval
    assert found.value == pytest.approx(errors.mean())
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.03 * width(found))


def test_resamples_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = numbers(*np.random.default_rng(7).normal(size=(2, 50)), missing=5)
    whole = metric_intervals(given, num_resamples=100).tasks["t"]["mae"]
    monkeypatch.setattr(intervals, "_WEIGHTS_AT_ONCE", 55 * 7)
    pieces = metric_intervals(given, num_resamples=100).tasks["t"]["mae"]
    assert (pieces.low, pieces.high) == pytest.approx((whole.low, whole.high), rel=1e-12)


def test_tasks_are_resampled_together_in_the_score() -> None:
    """Two tasks with opposite errors: each moves, their mean does not."""
    is_right = np.random.default_rng(5).random(1000) < 0.5
    given = {
        name: dataclasses.replace(
            statistics_of(MULTI, [["a"]] * 1000, [["a"] if right else [] for right in side]),
            task=dataclasses.replace(MULTI, name=name),
        )
        for name, side in zip("uv", (is_right, ~is_right), strict=True)
    }
    found = metric_intervals(given)
    assert found.score.value == pytest.approx(np.mean([of["f1_macro"].value for of in found.tasks.values()]))
    assert width(found.score) < 0.25 * width(found.tasks["u"]["f1_macro"])


def test_few_rows_have_intervals_without_nan() -> None:
    one = metric_intervals(numbers([1.0], [3.0]))
    assert {name: (i.value, i.low, i.high) for name, i in one.tasks["t"].items()} == {
        "mae": (2, None, None),
        "rmse": (2, None, None),
    }
    assert one.score is None
    # Most resamples of 40 examples have no labelled row at all, or only one of the two.
    few = metric_intervals(numbers([1.0, 2.0], [1.0, 3.0], missing=38))
    bounds = {name: (i.low, i.high) for name, i in few.tasks["t"].items()}
    assert np.isfinite([bounds[name] for name in ("r2", "mae", "rmse")]).all()
    assert few.tasks["t"]["mae"].low == 0.0
    assert metric_intervals(numbers([], [], missing=3)).tasks == {"t": {}}
    assert metric_intervals({}).score is None


@pytest.mark.parametrize(
    ("task", "metric", "right", "wrong"),
    [
        (SINGLE, "accuracy", "a", "b"),
        (MULTI, "exact_match", ["a"], ["b"]),
        (ANSWER, "exact_match", [("answer", 0, 3)], [("answer", 4, 8)]),
    ],
)
@pytest.mark.parametrize("num_right", [0, 37, 50])
def test_a_share_of_rows_has_the_wilson_interval(
    task: Task, metric: str, right: Any, wrong: Any, num_right: int
) -> None:
    expected = binomtest(num_right, 50).proportion_ci(method="wilson")
    found = ends(task, metric, [right] * 50, [right] * num_right + [wrong] * (50 - num_right))
    assert found == pytest.approx((expected.low, expected.high), abs=1e-5)
    assert 0 <= found[0] < found[1] <= 1


@pytest.mark.parametrize("num_rows", [10, 50, 400])
def test_intervals_of_right_rows_reach_the_excludable_loss(num_rows: int) -> None:
    """A share of 1 - 0.025^(1/N) of the rows may be wrong: Clopper's and Pearson's bound."""
    answers = [[("answer", 0, 3)]] * num_rows
    lost = 1 - 0.025 ** (1 / num_rows)
    assert ends(ANSWER, "span_overlap_f1", answers, answers) == pytest.approx((1 - lost, 1))
    # Half of the labels are 0 and half are 1: an error is at most 1.
    labels = [0.0, 1.0] * (num_rows // 2)
    assert ends(NUMBER, "mae", labels, labels) == pytest.approx((0, lost))
    assert ends(NUMBER, "r2", labels, labels) == pytest.approx((1 - 4 * lost, 1))


def test_the_better_end_of_a_regression_assumes_no_error_below_0() -> None:
    """Few unseen rows can have large errors, but no error can be below 0."""
    rng = np.random.default_rng(3)
    truth = rng.normal(0, 3, 300)
    found = metric_intervals(numbers(truth, truth + rng.normal(size=300))).tasks["t"]
    assert 0.85 < found["rmse"].low < 1 < 1.5 < found["rmse"].high
    assert 0.65 < found["mae"].low < 0.85
    assert found["r2"].low < 0.6 < found["r2"].value < found["r2"].high < 0.95


def test_a_task_at_its_worst_does_not_widen_the_score_downwards() -> None:
    """An r2 below 0 counts as 0."""
    truth = np.random.default_rng(3).normal(0, 3, 50)
    found = metric_intervals(numbers(truth, -truth))
    assert found.tasks["t"]["r2"].value < -2
    assert found.score.value == found.score.low == 0 < found.score.high < 0.1


def test_a_task_at_its_best_does_not_widen_the_score_upwards() -> None:
    given = {
        name: dataclasses.replace(
            statistics_of(
                ANSWER, [[("answer", 0, 3)]] * 50, [[("answer", 0, 3)] * right for right in rights]
            ),
            task=dataclasses.replace(ANSWER, name=name),
        )
        for name, rights in (("right", [True] * 50), ("half", [True, False] * 25))
    }
    found = metric_intervals(given)
    assert found.tasks["right"][ANSWER.primary_metric].high == 1
    low, high = (getattr(found.tasks["half"][ANSWER.primary_metric], end) for end in ("low", "high"))
    assert found.score.low < (1 + low) / 2
    assert found.score.high == pytest.approx((1 + high) / 2, abs=0.005)


def test_an_unknown_row_bound_without_spread_has_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal labels do not limit an error, and nothing limits a metric of own code."""
    assert ends(NUMBER, "mae", [2.0] * 50, [2.0] * 50) == (None, None)
    low, high = ends(NUMBER, "mae", [2.0] * 50, [2.0, 3.0] * 25)
    assert 0 < low < 0.5 < high < 1
    own = Extension(lambda truths, predictions: float(truths == predictions), kinds=("single_label",))
    monkeypatch.setitem(METRICS, "own", own)
    assert ends(SINGLE, "own", ["a"] * 9, ["a"] * 9) == (None, None)
    assert ends(SINGLE, "own", ["a", "a"], ["a", "b"]) == (0, 1)
    one = statistics_of(dataclasses.replace(SINGLE, name="u", primary="own"), [*[None] * 30, "a"], ["a"] * 31)
    shares = statistics_of(SINGLE, [*"ab" * 15, None], ["a"] * 31)
    score = metric_intervals({"t": shares, "u": one}).score
    assert score == Interval(pytest.approx((1 / 3 + 1) / 2), None, None), "the spread of one row is unknown"


@pytest.mark.parametrize("seed", range(10))
def test_no_two_predictions_change_f1_macro_by_more_than_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = np.append(rng.integers(0, 2, 8), 2)
    predicted = np.where(rng.random(9) < 0.7, truth, rng.integers(0, 3, 9))
    task, names = Task("t", "single_label", CLASSES), np.array(CLASSES)
    given = statistics_of(task, names[truth], names[predicted])
    bound = macro_f1_change(2, *given.counts_NC.values())
    value, largest = given.scores()["f1_macro"], 0.0
    for rows in itertools.combinations(range(9), 2):
        for classes in itertools.product(range(3), repeat=2):
            other = predicted.copy()
            other[list(rows)] = classes
            changed = statistics_of(task, names[truth], names[other]).scores()["f1_macro"]
            largest = max(largest, abs(changed - value))
    assert 0 < largest <= bound + 1e-12


# Groups of rows


def test_copies_of_rows_do_not_narrow_an_interval() -> None:
    truth, predicted = np.random.default_rng(7).normal(size=(2, 40))
    once = metric_intervals(numbers(truth, predicted)).tasks["t"]["mae"]
    copied = numbers(np.tile(truth, 4), np.tile(predicted, 4))["t"]
    groups = np.tile(np.arange(40), 4)
    found = metric_intervals({"t": dataclasses.replace(copied, group_E=groups)}).tasks["t"]["mae"]
    assert (found.low, found.high) == pytest.approx((once.low, once.high))
    assert width(metric_intervals({"t": copied}).tasks["t"]["mae"]) < 0.7 * width(once)


def test_rows_of_one_group_have_no_known_accuracy() -> None:
    rows = statistics_of(SINGLE, ["a"] * 200, ["a"] * 190 + ["b"] * 10)
    found = metric_intervals({"t": dataclasses.replace(rows, group_E=np.zeros(200, np.intp))}).tasks["t"]
    assert (found["accuracy"].low, found["accuracy"].high) == (0.0, 1.0)


@pytest.mark.parametrize("is_even", [True, False])
def test_interval_of_accuracy_covers_the_population_of_authors(is_even: bool) -> None:
    """30 authors of 10 rows. The share of right rows of an author has a beta distribution around 85 %."""
    rng, draws, covered = np.random.default_rng(4), 150, 0
    for _ in range(draws):
        sizes = np.full(30, 10) if is_even else rng.geometric(0.1, 30)
        author_N = np.repeat(np.arange(30), sizes)
        right_N = rng.random(len(author_N)) < rng.beta(0.85 * 7 / 3, 0.15 * 7 / 3, 30)[author_N]
        predicted = np.where(right_N, "a", "b").tolist()
        rows = statistics_of(SINGLE, ["a"] * len(predicted), predicted)
        given = {"t": dataclasses.replace(rows, group_E=author_N)}
        found = metric_intervals(given, num_resamples=10).tasks["t"]["accuracy"]
        covered += found.low <= 0.85 <= found.high
    assert binomtest(covered, draws, 0.93, alternative="less").pvalue > 0.01
