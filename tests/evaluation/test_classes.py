"""Figures of classes and confusion against scikit-learn and seqeval."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from seqeval.metrics import classification_report
from seqeval.scheme import IOB2
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from hpo.data.examples import Example
from hpo.data.tasks import Task
from hpo.evaluation.classes import class_figures, confusion
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


def random_tags(rng: np.random.Generator, count: int, names: Any) -> list[str]:
    """IOB2 tags of `count` words."""
    tags: list[str] = []
    while len(tags) < count:
        if rng.random() < 0.4:
            name = rng.choice(names)
            tags += [f"B-{name}", *[f"I-{name}"] * int(rng.integers(0, 3))]
        else:
            tags.append("O")
    return tags[:count]


def spans_of(tags: list[str], words: list[str]) -> list[tuple[str, int, int]]:
    """Of words with one space between."""
    spans: list[tuple[str, int, int]] = []
    at = 0
    for tag, word in zip(tags, words, strict=True):
        if tag.startswith("B-"):
            spans.append((tag[2:], at, at + len(word)))
        elif tag != "O":
            spans[-1] = (*spans[-1][:2], at + len(word))
        at += len(word) + 1
    return spans


@pytest.mark.parametrize("kind", ["token_classification", "span_per_label"])
def test_span_figures_are_seqevals(kind: str) -> None:
    some = 0
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        names = NAMES[: rng.integers(1, 6)]
        rows, predictions, tags_of_rows, found_tags = [], [], [], []
        for _ in range(rng.integers(1, 6)):
            words = ["w" * int(n) for n in rng.integers(1, 6, rng.integers(2, 12))]
            truth = random_tags(rng, len(words), names[: rng.integers(1, 6)])
            found = truth if rng.random() < 0.4 else random_tags(rng, len(words), names)
            tags_of_rows.append(truth)
            found_tags.append(found)
            spans: dict[str, list[tuple[int, int]]] = {}
            for name, start, end in spans_of(truth, words):
                spans.setdefault(name, []).append((start, end))
            rows.append(Example("", " ".join(words), {}, spans, annotated=frozenset("t")))
            predictions.append(spans_of(found, words))
        if not any(tag != "O" for tags in tags_of_rows + found_tags for tag in tags):
            continue
        some += 1
        statistics = row_statistics(Task("t", kind, names), predictions, rows)
        with warnings.catch_warnings():
            # seqeval tells of a name without a prediction or a truth, whatever `zero_division` says.
            warnings.filterwarnings("ignore", category=UndefinedMetricWarning)
            report: Any = classification_report(
                tags_of_rows, found_tags, output_dict=True, mode="strict", scheme=IOB2, zero_division=0
            )
        for one in class_figures(statistics):
            if one.support + one.num_predicted == 0:
                assert one.name not in report
                assert one.f1 is None
                continue
            theirs = report[one.name]
            assert one.support == theirs["support"]
            assert (one.precision, one.recall, one.f1) == pytest.approx(
                (theirs["precision"], theirs["recall"], theirs["f1-score"]), rel=1e-12
            )
        scores = statistics.scores()
        assert scores["span_f1"] == pytest.approx(report["micro avg"]["f1-score"], rel=1e-12)
        of_truth = [report[one.name]["f1-score"] for one in class_figures(statistics) if one.support]
        macro = np.mean(of_truth) if of_truth else scores["span_f1"]
        assert scores["f1_macro"] == pytest.approx(macro, rel=1e-12)
    assert some > 0.9 * NUM_CASES


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


def test_no_annotated_row_has_no_figures() -> None:
    missing = Example("", "x", {}, {})
    statistics = row_statistics(Task("t", "multi_label", NAMES), [["a"]], [missing])
    assert class_figures(statistics) == ()
    assert confusion(statistics) is None
    assert statistics.scores() == {}
