"""Detailed evaluations: metrics, classes, worst rows, warnings and the stored record."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from support import every_kind
from support.labelled_rows import CLASSES, rows_of, statistics_of
from support.tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.data.examples import RowChecker
from hpo.data.tasks import parse_tasks
from hpo.evaluation.contributions import baselines
from hpo.evaluation.detailed import (
    class_figures,
    confusion,
    evaluate_predictions,
    predict_split,
    task_warnings,
    worst_mistakes,
)
from hpo.evaluation.record import DetailedEvaluation, read_document
from hpo.tasks.kind import Task
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import TokenizedSplit, Windowing
from hpo.training.evaluate import class_probabilities, decode_tasks
from hpo.training.metrics import RowStatistics, primary_mean, score

EVIDENCE = {**every_kind.TASKS["evidence"], "span_names": every_kind.TASKS["tags"]["classes"]}
TASKS = parse_tasks({**every_kind.TASKS, "evidence": EVIDENCE}, "tasks.json")
DECISIONS = {
    "tags": DecodingThresholds(threshold=0.41),
    "evidence": DecodingThresholds(threshold=0.6, merge_gap=2),
    "name": DecodingThresholds(null_offset=0.5),
}


def split_of(count: int, missing: Mapping[int, frozenset[str]]) -> TokenizedSplit:
    """Return rows of every kind; `missing` has the unlabelled tasks of a row."""
    checker, rng = RowChecker(TASKS, None, {}), random.Random(0)
    rows = []
    for number in range(count):
        example, problems = checker.check(every_kind.row(number, rng))
        assert example is not None, problems
        rows.append(replace(example, annotated=example.annotated - missing.get(number, frozenset())))
    return tokenize_split(rows, TASKS, tiny_tokenizer("wordpiece"), Windowing(24, "window", 6))


def random_logits(split: TokenizedSplit) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows = {"sequence": split.num_windows, "token": split.num_tokens}
    shapes = {task.name: (rows[task.level], task.num_outputs) for task in TASKS}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def split() -> TokenizedSplit:
    missing = {3: frozenset({"topic", "evidence"}), 5: frozenset({"name", "urgency", "tags"})}
    return split_of(60, missing)


@pytest.fixture(scope="module")
def evaluation(split: TokenizedSplit) -> DetailedEvaluation:
    predicted = predict_split(TASKS, random_logits(split), split, DECISIONS)
    return evaluate_predictions(predicted, split_name="test", num_resamples=200)


def test_metrics_equal_the_scores(split: TokenizedSplit, evaluation: DetailedEvaluation) -> None:
    given = {task.name: DECISIONS.get(task.name, DecodingThresholds()) for task in TASKS}
    predictions, _ = decode_tasks(TASKS, random_logits(split), split, given)
    likely = class_probabilities(TASKS, random_logits(split), split)
    expected = {
        task.name: score(task, predictions[task.name], split.examples, likely.get(task.name))
        for task in TASKS
    }
    found = {
        name: {metric: one.value for metric, one in task.metrics.items()}
        for name, task in evaluation.tasks.items()
    }
    assert found == expected
    assert evaluation.score.value == primary_mean(TASKS, expected)
    assert evaluation.score.low < evaluation.score.value < evaluation.score.high
    predicted = predict_split(TASKS, random_logits(split), split, {})
    assert predicted.decisions == {task.name: DecodingThresholds() for task in TASKS}
    assert evaluation.baseline.keys() == baselines(predicted.statistics).keys()
    assert (evaluation.split, evaluation.decided_on) == ("test", "validation")
    assert (evaluation.num_examples, evaluation.num_resamples, evaluation.level) == (60, 200, 0.95)


def stored(evaluation: DetailedEvaluation) -> DetailedEvaluation:
    """Return the evaluation after a way through the database."""
    content = json.loads(json.dumps(evaluation.as_json(), allow_nan=False))
    return TypeAdapter(DetailedEvaluation).validate_python(content)


def test_record_survives_json(evaluation: DetailedEvaluation) -> None:
    content = evaluation.as_json()
    assert stored(evaluation) == evaluation
    earlier = {**content, "tasks": {name: {**of, "calibration": {}} for name, of in content["tasks"].items()}}
    assert read_document(earlier) == earlier, "a removed part is ignored"
    keys = "kind num_rows metrics threshold decisions classes confusion worst warnings"
    assert list(content["tasks"]["topic"]) == keys.split()
    assert content["tasks"]["evidence"]["decisions"]["merge_gap"] == 2


def test_one_row_and_no_labelled_row() -> None:
    everything = frozenset(task.name for task in TASKS)
    for split in (split_of(1, {}), split_of(2, {0: everything, 1: everything})):
        predicted = predict_split(TASKS, random_logits(split), split, DECISIONS)
        found = evaluate_predictions(predicted, split_name="test", num_resamples=20)
        assert stored(found) == found
        assert all(task.warnings for task in found.tasks.values())
    assert found.score is None
    for task in found.tasks.values():
        assert (task.num_rows, task.metrics, task.classes, task.worst) == (0, {}, (), ())


def test_single_label_has_no_thresholds() -> None:
    (topic,) = (task for task in TASKS if task.kind == "single_label")
    split = split_of(4, {})
    predicted = predict_split([topic], random_logits(split), split, {})
    assert evaluate_predictions(predicted, split_name="test", num_resamples=20).decided_on == ""


# Classes


def check_classes(statistics: RowStatistics, truth: Any, predicted: Any, labels: Any) -> None:
    reference = precision_recall_fscore_support(
        truth, predicted, labels=labels, average=None, zero_division=0
    )
    found = class_figures(statistics)
    assert [one.name for one in found] == list(statistics.task.labels)
    for one, precision, recall, f1, support in zip(found, *reference, strict=True):
        assert one.support == support
        found_figures = (one.precision, one.recall, one.f1)
        if one.support + one.num_predicted:
            assert found_figures == pytest.approx((precision, recall, f1), rel=1e-12)
        else:
            assert found_figures == (None, None, None)


@pytest.mark.parametrize("seed", range(20))
def test_figures_of_classes_are_scikit_learns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = ("a", "b", "c", "d", "e")[: rng.integers(2, 6)]
    # Some classes are never true, others never predicted.
    truth = rng.choice(labels[: rng.integers(1, 6)], rng.integers(1, 40)).tolist()
    predicted = rng.choice(labels[-int(rng.integers(1, 6)) :], len(truth)).tolist()
    statistics = statistics_of(Task("t", "single_label", labels), truth, predicted)
    check_classes(statistics, truth, predicted, labels)
    found = confusion(statistics)
    matrix = confusion_matrix(truth, predicted, labels=labels)
    assert found.labels == labels
    assert list(found.counts) == [(*map(int, pair), int(matrix[tuple(pair)])) for pair in np.argwhere(matrix)]

    truth_NC, predicted_NC = (rng.random((30, len(labels))) < rng.random(len(labels)) ** 2 for _ in range(2))
    lists = [[[labels[c] for c in np.flatnonzero(row)] for row in side] for side in (truth_NC, predicted_NC)]
    statistics = statistics_of(Task("t", "multi_label", labels), *lists)
    check_classes(statistics, truth_NC, predicted_NC, range(len(labels)))
    found = confusion(statistics)
    together = truth_NC.T.astype(int) @ predicted_NC
    assert {(t, p): n for t, p, n in found.counts} == {
        (t, p): n for (t, p), n in np.ndenumerate(together) if n
    }


SINGLE = Task("t", "single_label", CLASSES)
MULTI = Task("t", "multi_label", CLASSES)
NUMBER = Task("t", "regression")
SLOTS = Task("t", "token_classification", ("a", "b"))
ANSWER = Task("t", "span_extraction", ("answer",))
SETS: list[Any] = [["a"], ["b"], ["c"], []] * 20
ANSWERS: list[Any] = [[("answer", 0, 1)], []] * 20


def test_worst_single_labels_have_the_least_likely_truth() -> None:
    p_NC = np.array([[0.6, 0.3, 0.1], [0.6, 0.1, 0.3], [0.9, 0.1, 0.0], [0.5, 0.0, 0.5], [0.6, 0.3, 0.1]])
    rows = [replace(row, id=str(n)) for n, row in enumerate(rows_of(SINGLE, "bbabb"))]
    found = worst_mistakes(SINGLE, ["a"] * 5, rows, p_NC)
    assert [(one.id, one.truth, one.predicted) for one in found] == [(row, "b", "a") for row in "3104"]
    assert [one.loss for one in found[1:]] == pytest.approx([-math.log(p) for p in (0.1, 0.3, 0.3)])
    assert math.isfinite(found[0].loss)


@pytest.mark.parametrize(
    ("task", "truth", "predicted", "threshold", "expected"),
    [
        (SINGLE, ["a", "b", "c"] * 20, ["b", "c", "a"] * 20, 0.5, []),
        (
            MULTI,
            SETS,
            [["a", "b"]] * 80,
            0.0009,
            ["Never", "Predicted in every row at the threshold 0.0009:"],
        ),
        (SINGLE, ["a", "b", "c"] * 20, ["a"] * 60, 0.5, ["Never predicted: `b`, `c`.", "Predicted in every"]),
        (SLOTS, [[("a", 0, 1)], [("b", 0, 1)]] * 20, [[("a", 0, 1)]] * 40, 0.5, ["Never predicted: `b`."]),
        (ANSWER, ANSWERS, [[("answer", 0, 1)]] * 40, 0.5, ["Predicted in every row at the null offset 0"]),
        (SINGLE, ["a"] * 5, ["a"] * 5, 0.5, ["Labelled rows: only 5,", "Fewer than 10 rows: `a`.", "Not in"]),
        (SINGLE, [], [], 0.5, ["No row of this split is labelled for t."]),
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
