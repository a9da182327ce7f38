"""Scores against scikit-learn, SQuAD and plain examples."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics as sklearn_metrics
from sklearn.calibration import calibration_curve
from sklearn.metrics import cohen_kappa_score, f1_score

from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task
from hpo.training.metrics import score

LABELS = ("a", "b", "c", "d")
SINGLE = Task("t", "single_label", LABELS)
MULTI = Task("t", "multi_label", LABELS)
NUMBER = Task("t", "regression")
Row = partial(Example, "id", labels={}, spans={}, annotated=frozenset({"t"}))
exactly = partial(pytest.approx, rel=1e-12)


def labelled(*values: Any) -> list[Example]:
    return [Row("", labels={"t": value}) for value in values]


@pytest.mark.parametrize("seed", range(2))
def test_single_label_scores_equal_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Class d is never true or predicted in some of the seeds.
    truth, predicted = rng.choice(LABELS[: 3 + seed % 2], (2, 40)).tolist()
    present = {"labels": sorted({*truth}), "average": "macro", "zero_division": 0}
    expected = {
        "accuracy": sklearn_metrics.accuracy_score(truth, predicted),
        "f1_micro": f1_score(truth, predicted, average="micro"),
        "f1_macro": f1_score(truth, predicted, **present),
    }
    found = score(SINGLE, predicted, labelled(*truth))
    assert {name: found[name] for name in expected} == exactly(expected)


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_multi_label_scores_equal_scikit_learn(share: float) -> None:
    truth_NC, predicted_NC = np.random.default_rng(0).random((2, 30, 4)) < share
    truth_NC[0, 0] = True
    both = (truth_NC, predicted_NC)
    truth, predicted = ([[LABELS[c] for c in np.flatnonzero(row)] for row in rows_NC] for rows_NC in both)
    present = {"labels": np.flatnonzero(truth_NC.any(axis=0)), "average": "macro", "zero_division": 0}
    expected = {
        "exact_match": sklearn_metrics.accuracy_score(truth_NC, predicted_NC),
        "f1_micro": f1_score(truth_NC, predicted_NC, average="micro", zero_division=1.0),
        "f1_macro": f1_score(truth_NC, predicted_NC, **present),
    }
    assert score(MULTI, predicted, labelled(*truth)) == exactly(expected)


def one_hot(truth: list[str]) -> np.ndarray:
    return np.array([[one == label for label in LABELS] for one in truth])


def areas(truth_NC: np.ndarray, p_NC: np.ndarray) -> dict[str, float]:
    """Return scikit-learn's values, the means over the classes with rows."""
    known = truth_NC.any(axis=0)
    both = truth_NC[:, known], p_NC[:, known]
    return {
        f"{name}_{average}": function(*(both if average == "macro" else (truth_NC, p_NC)), average=average)
        for name, function in (
            ("roc_auc", sklearn_metrics.roc_auc_score),
            ("average_precision", sklearn_metrics.average_precision_score),
        )
        for average in ("macro", "micro")
    }


def calibration(right: np.ndarray, confidence: np.ndarray) -> float:
    """Return the calibration error from scikit-learn's curve, whose bins are those of the metric."""
    of_true, mean = calibration_curve(right, confidence, n_bins=15)
    sizes = np.bincount(np.searchsorted(np.linspace(0, 1, 16)[1:-1], confidence), minlength=15)
    return float(np.abs(of_true - mean) @ sizes[sizes > 0] / len(right))


@pytest.mark.parametrize("seed", range(4))
def test_metrics_of_one_class_equal_scikit_learn(seed: int) -> None:
    """With equal probabilities in some seeds, and without rows of a class in others."""
    rng = np.random.default_rng(seed)
    truth = rng.choice(LABELS[: 3 + seed % 2], 60).tolist()
    p_NC = rng.dirichlet(np.ones(4), 60)
    if seed > 1:
        p_NC = rng.multinomial(3, [0.4, 0.3, 0.2, 0.1], 60) / 3
    predicted = [LABELS[c] for c in p_NC.argmax(axis=1)]
    found = score(SINGLE, predicted, labelled(*truth), p_NC)
    expected = {
        "matthews_corrcoef": sklearn_metrics.matthews_corrcoef(truth, predicted),
        "quadratic_kappa": cohen_kappa_score(truth, predicted, weights="quadratic", labels=LABELS),
        "log_loss": sklearn_metrics.log_loss(truth, p_NC, labels=LABELS),
        "calibration_error": calibration(np.equal(truth, predicted), p_NC.max(axis=1)),
        **areas(one_hot(truth), p_NC),
    }
    assert {name: found[name] for name in expected} == exactly(expected)
    assert {*found} == {*SINGLE.metrics}
    two = Task("t", "single_label", LABELS[:2])
    truth, p_N = rng.choice(LABELS[:2], 60).tolist(), rng.integers(0, 9, 60) / 8
    found = score(two, ["a"] * 60, labelled(*truth), np.stack([1 - p_N, p_N], axis=1))
    assert found["roc_auc_macro"] == exactly(sklearn_metrics.roc_auc_score(np.equal(truth, "b"), p_N))
    assert found["matthews_corrcoef"] == 0, "of a constant prediction, as scikit-learn"


@pytest.mark.parametrize("seed", range(4))
def test_metrics_of_several_classes_equal_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth_NC = rng.random((60, 4)) < [0.5, 0.2, 0.05, 0.3 * (seed % 2)]
    truth_NC[0, :3] = True
    p_NC = rng.integers(0, 5, (60, 4)) / 4 if seed > 1 else rng.random((60, 4))
    truth, predicted = ([[*np.array(LABELS)[row]] for row in rows] for rows in (truth_NC, p_NC > 0.5))
    found = score(MULTI, predicted, labelled(*truth), p_NC)
    expected = {
        "log_loss": sklearn_metrics.log_loss(truth_NC.ravel(), p_NC.ravel()),
        "calibration_error": calibration(truth_NC.ravel(), p_NC.ravel()),
        **areas(truth_NC, p_NC),
    }
    assert {name: found[name] for name in expected} == exactly(expected)
    assert {*found} == {*MULTI.metrics}


def test_order_of_classes_in_kappa() -> None:
    """That of the declaration; classes from the rows have none."""
    labels = ("2", "10", "1")
    truth, predicted = np.random.default_rng(0).choice(labels, (2, 50))
    found = score(Task("t", "single_label", labels), predicted.tolist(), labelled(*truth.tolist()))
    theirs = cohen_kappa_score(truth, predicted, weights="quadratic", labels=labels)
    assert found["quadratic_kappa"] == exactly(theirs)
    words = Task("t", "single_label", LABELS, is_inferred=True)
    assert "quadratic_kappa" not in {*words.metrics, *score(words, [*LABELS], labelled(*LABELS))}


def test_undefined_metrics_have_no_value() -> None:
    p_NC = np.tile([0.7, 0.1, 0.1, 0.1], (3, 1))
    found = score(SINGLE, ["a"] * 3, labelled(*"aaa"), p_NC)
    assert {*found} >= {"accuracy", "log_loss", "calibration_error", "average_precision_macro"}
    assert not {"matthews_corrcoef", "quadratic_kappa", "roc_auc_macro"} & {*found}
    assert not {"pearson", "spearman"} & {*score(NUMBER, [0.1] * 3, labelled(0.1, 0.2, 0.3))}
    assert not {"pearson", "spearman"} & {*score(NUMBER, [0.1, 0.7, 0.3], labelled(*[0.1] * 3))}
    assert not {"log_loss", "roc_auc_micro"} & {*score(SINGLE, ["a", "b"], labelled("a", "b"))}


@pytest.mark.parametrize("scale", [1, 1e-20, 1e9])
def test_correlations_equal_scipy(scale: float) -> None:
    truth, predicted = np.random.default_rng(1).normal(size=(2, 40)).round(1) * scale
    predicted[0] = 1.0
    found = score(NUMBER, predicted.tolist(), labelled(*truth.tolist()))
    assert found["pearson"] == pytest.approx(pearsonr(truth, predicted).statistic, rel=1e-9)
    assert found["spearman"] == pytest.approx(spearmanr(truth, predicted).statistic, rel=1e-12)


def test_f1_with_absent_classes() -> None:
    truth = ["a", "b"] * 200
    after = score(SINGLE, ["c", *truth[1:]], labelled(*truth))
    assert after["f1_macro"] == pytest.approx(1 - 0.00125, abs=1e-5)
    assert score(MULTI, [["a"], []], labelled([], []))["f1_macro"] == 0.0, "with no true class, as f1_micro"
    assert score(MULTI, [[], []], labelled([], [])) == {"f1_macro": 1.0, "f1_micro": 1.0, "exact_match": 1.0}
    slots = Task("t", "token_classification", LABELS)
    assert score(slots, [[]], [Row("x")]) == {"span_f1": 1.0, "span_overlap_f1": 1.0, "f1_macro": 1.0}


def test_regression_scores_equal_scikit_learn() -> None:
    truth, predicted = np.random.default_rng(0).normal(5, 2, (2, 20))
    expected = {
        "r2": sklearn_metrics.r2_score(truth, predicted),
        "mae": sklearn_metrics.mean_absolute_error(truth, predicted),
        "rmse": sklearn_metrics.root_mean_squared_error(truth, predicted),
    }
    found = score(NUMBER, predicted.tolist(), labelled(*truth.tolist()))
    assert {name: found[name] for name in expected} == exactly(expected)
    for predicted, expected in (([2.0, 2.0], 1.0), ([2.0, 3.0], 0.0)):
        assert score(NUMBER, predicted, labelled(2.0, 2.0))["r2"] == expected
    assert score(NUMBER, [1.0], labelled(2.0)) == {"mae": 1.0, "rmse": 1.0}
    assert score(NUMBER, [1.0, float("nan")], labelled(2.0, 3.0)) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_truth(kind: str) -> None:
    task = Task("t", kind, ("answer",) if kind == "span_extraction" else LABELS)
    missing = Row("some text", annotated=frozenset({"other"}))
    assert score(task, [["a"]], [missing]) == {}
    if task.kind == "single_label":
        assert score(task, ["a", "b"], [missing, *labelled("b")])["accuracy"] == 1.0


@pytest.mark.parametrize("kind", ["token_classification", "span_per_label"])
def test_span_scores(kind: str) -> None:
    """By name: a has 1 of 2 spans and a wrong one, b is missed, c is only predicted."""
    text = "the quick brown fox jumps over the lazy dog"
    rows = [Row(text, spans={"a": [(4, 9), (10, 19)], "b": [(35, 43)]}), Row(text, spans={})]
    predictions = [[("a", 4, 9), ("a", 10, 15), ("a", 20, 25)], [("c", 0, 3)]]
    overlap = 2 * 2 / (4 + 5)  # two words of four predicted and five true: quick, brown
    expected = {"span_f1": 2 * 1 / (4 + 3), "span_overlap_f1": overlap, "f1_macro": (2 * 1 / (3 + 2) + 0) / 2}
    assert score(Task("t", kind, LABELS), predictions, rows) == exactly(expected)


def test_answer_scores_equal_squad() -> None:
    """SQuAD compares without case, punctuation and articles, with the best of the accepted answers."""
    text = "In 1872, the U.S. built a rail-road (the first); a bridge, and The Tower."

    def spans(*answers: str) -> list[tuple[int, int]]:
        return [(text.index(answer), text.index(answer) + len(answer)) for answer in answers]

    rows, predictions, expected = [], [], []
    for accepted, predicted, exact, overlap in (
        (["the U.S."], "the U.S.", 1, 1),  # the exact span
        (["U.S."], "the U.S.", 1, 1),
        (["bridge", "a bridge, and The Tower."], "bridge, and", 0, 0.8),
        (["a bridge, and The Tower."], "Tower", 0, 1 / 2),
        (["1872"], "bridge", 0, 0),
        (["1872"], "", 0, 0),
        ([], "bridge", 0, 0),
        ([], "", 1, 1),
        (["the"], "", 1, 1),  # nothing is left of an article
    ):
        answers = {"answer": spans(*accepted)} if accepted else {}
        rows.append(Row(text, spans={name: each[:1] for name, each in answers.items()}, alt_spans=answers))
        predictions.append([("answer", *span) for span in spans(predicted)] if predicted else [])
        expected.append((exact, overlap))
    scores = dict(zip(("exact_match", "span_overlap_f1"), np.mean(expected, axis=0), strict=True))
    scores["span_f1"] = 2 * 1 / (7 + 6)  # one hit of seven true and six predicted
    assert score(Task("t", "span_extraction", ("answer",)), predictions, rows) == exactly(scores)
