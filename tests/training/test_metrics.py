from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics
from sklearn.metrics import f1_score

from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task
from hpo.training.metrics import score

LABELS = ("a", "b", "c", "d")
SINGLE = Task("t", "single_label", LABELS)
MULTI = Task("t", "multi_label", LABELS)
SLOTS = Task("t", "token_classification", LABELS)
ANSWER = Task("t", "span_extraction", ("answer",))
NUMBER = Task("t", "regression")
Row = partial(Example, "id", labels={}, spans={}, annotated=frozenset({"t"}))


def labelled(*values: Any) -> list[Example]:
    return [Row("", labels={"t": value}) for value in values]


@pytest.mark.parametrize("seed", range(2))
def test_single_label_scores_equal_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Class d is never true or predicted in some of the seeds.
    truth, predicted = rng.choice(LABELS[: 3 + seed % 2], (2, 40)).tolist()
    ours = score(SINGLE, predicted, labelled(*truth))
    assert ours == pytest.approx(
        {
            "accuracy": sklearn_metrics.accuracy_score(truth, predicted),
            "f1_micro": f1_score(truth, predicted, average="micro"),
            "f1_macro": f1_score(truth, predicted, labels=sorted({*truth}), average="macro", zero_division=0),
        },
        rel=1e-12,
    )


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(2))
def test_multi_label_scores_equal_scikit_learn(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    truth_NC, predicted_NC = rng.random((2, 30, 4)) < share
    truth_NC[0, 0] = True
    truth, predicted = (
        [[LABELS[c] for c in np.flatnonzero(row)] for row in m] for m in (truth_NC, predicted_NC)
    )
    ours = score(MULTI, predicted, labelled(*truth))
    assert ours == pytest.approx(
        {
            "exact_match": sklearn_metrics.accuracy_score(truth_NC, predicted_NC),
            "f1_micro": f1_score(truth_NC, predicted_NC, average="micro", zero_division=1.0),
            "f1_macro": f1_score(
                truth_NC, predicted_NC, labels=np.flatnonzero(truth_NC.any(axis=0)), average="macro"
            ),
        },
        rel=1e-12,
    )


def test_f1_macro_without_absent_classes() -> None:
    truth = ["a", "b"] * 200
    before = score(SINGLE, truth, labelled(*truth))
    after = score(SINGLE, ["c", *truth[1:]], labelled(*truth))
    assert before["f1_macro"] == 1.0
    assert 100 * (before["f1_macro"] - after["f1_macro"]) == pytest.approx(0.125, abs=0.001)
    assert score(MULTI, [["a"], []], labelled([], []))["f1_macro"] == 0.0, "with no true class, as f1_micro"


def test_scores_with_nothing_to_find() -> None:
    assert score(MULTI, [[], []], labelled([], [])) == {"f1_macro": 1.0, "f1_micro": 1.0, "exact_match": 1.0}
    assert score(SLOTS, [[]], [Row("x")]) == {"span_f1": 1.0, "span_overlap_f1": 1.0, "f1_macro": 1.0}


@pytest.mark.parametrize("seed", range(2))
def test_regression_scores_equal_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, predicted = rng.normal(5, 2, (2, 20))
    assert score(NUMBER, predicted.tolist(), labelled(*truth.tolist())) == pytest.approx(
        {
            "r2": sklearn_metrics.r2_score(truth, predicted),
            "mae": sklearn_metrics.mean_absolute_error(truth, predicted),
            "rmse": sklearn_metrics.root_mean_squared_error(truth, predicted),
        },
        rel=1e-12,
    )


def test_undefined_r2() -> None:
    for predicted, expected in (([2.0, 2.0], 1.0), ([2.0, 3.0], 0.0)):
        assert score(NUMBER, predicted, labelled(2.0, 2.0))["r2"] == expected
        assert sklearn_metrics.r2_score([2.0, 2.0], predicted) == expected
    assert score(NUMBER, [1.0], labelled(2.0)) == {"mae": 1.0, "rmse": 1.0}
    assert score(NUMBER, [1.0, float("nan")], labelled(2.0, 3.0)) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_truth(kind: str) -> None:
    task = Task("t", kind, ("answer",) if kind == "span_extraction" else LABELS)
    missing = Row("some text", annotated=frozenset({"other"}))
    assert score(task, [["a"]], [missing]) == {}
    if task.kind == "single_label":
        assert score(task, ["a", "b"], [missing, *labelled("b")])["accuracy"] == 1.0


TEXT = "the quick brown fox jumps over the lazy dog"


def spans_reference(predictions: list[Any], rows: list[Example]) -> dict[str, float]:
    """Precision and recall from lists, one span and one word at a time."""

    def f1(hits: int, found: int, true: int) -> float:
        if not found + true:
            return 1.0
        precision, recall = (hits / found if found else 0.0), (hits / true if true else 0.0)
        return 2 * precision * recall / (precision + recall) if hits else 0.0

    def words(text: str, spans: list[tuple[int, int]]) -> list[int]:
        matches = enumerate(re.finditer(r"\S+", text))
        return [i for i, m in matches if any(max(m.start(), s) < min(m.end(), e) for s, e in spans)]

    exact, overlap = Counter[tuple[str, str]](), Counter[str]()
    for spans, row in zip(predictions, rows, strict=True):
        for name in LABELS:
            truth = row.spans.get(name, [])
            found = [(s, e) for n, s, e in spans if n == name]
            exact.update({(name, "hit"): len([s for s in found if s in truth])})
            exact.update({(name, "found"): len(found), (name, "true"): len(truth)})
            a, b = words(row.text, found), words(row.text, truth)
            overlap.update({"hit": len([w for w in a if w in b]), "found": len(a), "true": len(b)})
    by_name = [tuple(exact[name, key] for key in ("hit", "found", "true")) for name in LABELS]
    of_truth = [f1(*counts) for counts in by_name if counts[2]]
    micro = f1(*(sum(column) for column in zip(*by_name, strict=True)))
    return {
        "span_f1": micro,
        "span_overlap_f1": f1(overlap["hit"], overlap["found"], overlap["true"]),
        "f1_macro": sum(of_truth) / len(of_truth) if of_truth else micro,
    }


@pytest.mark.parametrize("kind", ["token_classification", "span_per_label"])
@pytest.mark.parametrize("seed", range(2))
def test_span_scores_equal_a_plain_loop(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def spans() -> list[tuple[str, int, int]]:
        starts = sorted(set(rng.integers(0, len(TEXT) - 9, rng.integers(0, 4)).tolist()))
        return [(LABELS[rng.integers(3)], start, start + int(rng.integers(1, 9))) for start in starts]

    predictions, rows = [], []
    for _ in range(20):
        truth = spans()
        by_name: dict[str, list[tuple[int, int]]] = {}
        for name, start, end in truth:
            by_name.setdefault(name, []).append((start, end))
        rows.append(Row(TEXT, spans=by_name))
        predictions.append(truth[1:] + [span for span in spans() if span not in truth])
    ours = score(Task("t", kind, LABELS), predictions, rows)
    assert ours == pytest.approx(spans_reference(predictions, rows), rel=1e-12)
    assert 0 < ours["span_f1"] < 1


def squad_official(prediction: str, answers: list[str]) -> tuple[float, float]:
    """`compute_exact` and `compute_f1` of SQuAD 2.0's evaluate-v2.0.py, over the accepted answers."""

    def normalize_answer(s: str) -> str:
        s = "".join(ch for ch in s.lower() if ch not in set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"))
        return " ".join(re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", s).split())

    def compute_f1(a_gold: str, a_pred: str) -> float:
        gold_toks, pred_toks = normalize_answer(a_gold).split(), normalize_answer(a_pred).split()
        num_same = sum((Counter(gold_toks) & Counter(pred_toks)).values())
        if len(gold_toks) == 0 or len(pred_toks) == 0:
            return float(gold_toks == pred_toks)
        if num_same == 0:
            return 0.0
        precision, recall = num_same / len(pred_toks), num_same / len(gold_toks)
        return 2 * precision * recall / (precision + recall)

    answers = [answer for answer in answers if normalize_answer(answer)] or [""]
    exact = max(float(normalize_answer(answer) == normalize_answer(prediction)) for answer in answers)
    return exact, max(compute_f1(answer, prediction) for answer in answers)


@pytest.mark.parametrize("seed", range(2))
def test_answer_scores_equal_squad(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = "In 1872, the U.S. built a rail-road (the first); a bridge, and The Tower."

    def span() -> tuple[int, int]:
        start = int(rng.integers(0, len(text) - 1))
        return start, int(rng.integers(start + 1, min(start + 20, len(text)) + 1))

    predictions: list[list[tuple[str, int, int]]] = []
    rows, expected = [], []
    for _ in range(40):
        accepted = [span() for _ in range(rng.integers(0, 4))]
        choice = rng.random()
        found = [] if choice < 0.3 else [accepted[-1] if accepted and choice < 0.6 else span()]
        predictions.append([("answer", *s) for s in found])
        # The first accepted answer is the truth; the others only count through alt_spans.
        spans = {"answer": accepted[:1]} if accepted else {}
        rows.append(Row(text, spans=spans, alt_spans={"answer": accepted} if accepted else {}))
        texts = [text[s:e] for s, e in accepted]
        expected.append(squad_official(text[found[0][0] : found[0][1]] if found else "", texts))
    ours = score(ANSWER, predictions, rows)
    num_answerable = sum(bool(row.spans) for row in rows)
    exact, overlap = np.mean(expected, axis=0)
    pairs = zip(predictions, rows, strict=True)
    hits = sum(bool(found) and found[0][1:] in row.alt_spans.get("answer", []) for found, row in pairs)
    assert ours == pytest.approx(
        {
            "exact_match": exact,
            "span_overlap_f1": overlap,
            "span_f1": 2 * hits / (num_answerable + sum(map(len, predictions))),
        },
        rel=1e-12,
    )
