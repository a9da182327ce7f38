"""Predictions from logits, and the thresholds."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.span_extraction import MAX_ANSWER_TOKENS
from hpo.training.evaluate import choose_decision, decode, decode_tasks
from hpo.training.metrics import score

NAMES = ("a", "b")
SINGLE = Task("t", "single_label", NAMES)
MULTI = Task("t", "multi_label", NAMES)
NUMBER = Task("t", "regression", target_mean=10.0, target_std=2.0)
SLOTS = Task("t", "token_classification", NAMES)
OVERLAPPING = Task("t", "token_classification", NAMES, spans_may_overlap=True)
ANSWER = Task("t", "span_extraction", ("answer",), inside_segment="context")
EVIDENCE = Task("t", "span_per_label", NAMES, evidence_for="labels")
ALL = (SINGLE, MULTI, NUMBER, SLOTS, OVERLAPPING, ANSWER, EVIDENCE)
DEFAULT = DecodingThresholds()
WORDS = "aa bb cc dd ee ff gg hh"


def example_of(text: str, **fields: Any) -> Example:
    defaults = {"labels": {}, "spans": {}, "annotated": {"t"}, "segments": {"context": (0, len(text))}}
    return Example("id", text, **defaults | fields)


def split_of(examples: Sequence[Example], *arrays: Sequence[Any]) -> Any:
    names = ("char_start_T", "char_end_T", "owned_T", "window_start_W1", "window_example_W")
    return SimpleNamespace(examples=examples, **dict(zip(names, map(np.array, arrays), strict=True)))


def make_split(rows: Sequence[Example], window: int = 1000, overlap: int = 0) -> Any:
    """Make windows of [CLS], at most `window` words, [SEP]. The later window owns common words."""
    start, end, owned, bounds, example = [], [], [], [0], []
    for e, row in enumerate(rows):
        words = [match.span() for match in re.finditer(r"\S+", row.text)]
        step = window - overlap
        for first in range(0, max(1, len(words) - overlap), step):
            part = words[first : first + window]
            is_last = first + window >= len(words)
            start += [-1, *(s for s, _ in part), -1]
            end += [-1, *(e for _, e in part), -1]
            owned += [False, *(i < step or is_last for i in range(len(part))), False]
            bounds.append(len(start))
            example.append(e)
    return split_of(rows, start, end, owned, bounds, example)


def make_window(text: str, start: list[int], end: list[int], is_text: bool = True) -> Any:
    """One window of these tokens, without special ones."""
    return split_of([example_of(text)], start, end, [is_text] * len(start), [0, len(start)], [0])


def random_logits(task: Task, split: Any) -> Any:
    size = len(split.window_example_W if task.level == "sequence" else split.owned_T)
    return np.random.default_rng(0).normal(size=(size, task.num_outputs)).astype(np.float32)


@pytest.mark.parametrize(
    ("task", "decision", "logits", "expected"),
    [
        # The log-probabilities are averaged: window 1 is sure of b, window 0 leans to a; the sum of raw
        # logits would say a.
        (SINGLE, DEFAULT, [[100.0, 99.0], [0.0, 3.0], [2.0, 0.0]], ["b", "a"]),
        # The largest probability counts.
        (MULTI, DEFAULT, [[3.0, -3.0], [-5.0, -3.0], [-1.0, -0.5]], [["a"], []]),
        (MULTI, DecodingThresholds(threshold=0.3), [[3.0, -3.0], [-5.0, -3.0], [-1.0, -0.5]], [["a"], ["b"]]),
        # The mean, in raw units.
        (NUMBER, DEFAULT, [[1.0], [2.0], [-1.0]], [13.0, 8.0]),
    ],
)
def test_windows_of_one_text(task: Task, decision: DecodingThresholds, logits: Any, expected: Any) -> None:
    split = make_split([example_of("x y"), example_of("z")], window=1)
    assert split.window_example_W.tolist() == [0, 0, 1]
    assert decode(task, np.array(logits, np.float32), split, decision) == expected


def spread(split: Any, by_word: Any) -> Any:
    """Give each token the logits of its word where its window owns it, and misleading ones elsewhere."""
    logits = np.full((len(split.owned_T), by_word.shape[1]), 9.0, np.float32)
    logits[split.owned_T] = by_word
    return logits


@pytest.mark.parametrize("window", [1000, 5])
@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O Ba Ia O Ba Ba Ia Ia", [("a", 3, 8), ("a", 12, 14), ("a", 15, 23)]),
        ("Ia Ia O Ib O O O Bb", [("a", 0, 5), ("b", 9, 11), ("b", 21, 23)]),
        ("Ba Ib Ib Bb Ia O O Ia", [("a", 0, 2), ("b", 3, 8), ("b", 9, 11), ("a", 12, 14), ("a", 21, 23)]),
    ],
)
def test_spans_of_tags(tags: str, expected: list[Any], window: int) -> None:
    split = make_split([example_of(WORDS)], window, overlap=2)
    numbers = [["O", "Ba", "Ia", "Bb", "Ib"].index(tag) for tag in tags.split()]
    assert decode(SLOTS, spread(split, np.eye(5)[numbers]), split, DEFAULT) == [expected]
    by_name = [[n - k if n in (k + 1, k + 2) else 0 for n in numbers] for k in (0, 2)]
    logits = spread(split, np.concatenate([np.eye(3)[each] for each in by_name], axis=1))
    assert sorted(decode(OVERLAPPING, logits, split, DEFAULT)[0]) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "start", "end", "tags", "expected"),
    [
        # The second segment comes first: a pair (question, context) of a text with the question at its end.
        ("xx yy zz uu", [6, 9, 0, 3], [8, 11, 2, 5], [1, 2, 2, 2], [("a", 0, 5), ("a", 6, 11)]),
        ("x  yy z", [0, 1, 3, 5], [1, 3, 6, 7], [0, 1, 2, 0], [("a", 3, 5)]),  # without outer white space
        ("x  yy z", [0, 1, 3, 5], [1, 3, 6, 7], [0, 1, 0, 0], []),
    ],
)
def test_spans_of_odd_tokens(text: str, start: Any, end: Any, tags: list[int], expected: Any) -> None:
    assert decode(SLOTS, np.eye(5)[tags], make_window(text, start, end), DEFAULT) == [expected]


def best_answer(split: Any, logits: Any) -> tuple[float, list[tuple[str, int, int]]]:
    """The best margin of one text over no answer and its span, pair by pair."""
    best: tuple[float, list[tuple[str, int, int]]] = (-np.inf, [])
    low, high = split.examples[0].segments["context"]
    for first, last in itertools.pairwise(split.window_start_W1):
        null = float(logits[first, 0]) + float(logits[first, 1])
        for i, j in itertools.combinations_with_replacement(range(first, last), 2):
            inside = all(split.char_start_T[t] >= low and 0 <= split.char_end_T[t] <= high for t in (i, j))
            margin = float(logits[i, 0]) + float(logits[j, 1]) - null
            if inside and split.owned_T[i] and j - i < MAX_ANSWER_TOKENS and margin > best[0]:
                best = (margin, [("answer", int(split.char_start_T[i]), int(split.char_end_T[j]))])
    return best


@pytest.mark.parametrize(("window", "overlap"), [(1000, 0), (40, 10)])
def test_answers_equal_all_pairs(window: int, overlap: int) -> None:
    segments = {"question": (0, 9), "context": (9, 409)}
    split = make_split([example_of("question " + "word " * 80, segments=segments)], window, overlap)
    logits = random_logits(ANSWER, split)
    logits[split.window_start_W1[1:] - 2, 1] += 3  # far-off pairs that the bound on the length has to refuse
    margin, spans = best_answer(split, logits)
    for offset, expected in ((margin - 0.01, spans), (margin + 0.01, [])):
        assert decode(ANSWER, logits, split, DecodingThresholds(null_offset=offset)) == [expected]


@pytest.mark.parametrize("window", [1000, 5])
@pytest.mark.parametrize(
    ("threshold", "gap", "expected"),
    [
        (0.5, 0, [(3, 5), (9, 14), (21, 23)]),
        (0.5, 1, [(3, 14), (21, 23)]),
        (0.5, 2, [(3, 23)]),
        (0.85, 0, [(3, 5)]),
        (0.95, 0, [(3, 5)]),  # nothing is above, so the run of the largest above half of it
        (0.95, 1, [(3, 14)]),
    ],
)
def test_evidence_of_probabilities(threshold: float, gap: int, expected: list[Any], window: int) -> None:
    split = make_split([example_of(WORDS)], window, overlap=2)
    p = np.array([0.1, 0.9, 0.4, 0.6, 0.7, 0.2, 0.2, 0.8])
    logits = spread(split, np.log(np.stack([p, 1 - p], 1) / np.stack([1 - p, p], 1)))
    decision = DecodingThresholds(threshold=threshold, merge_gap=gap)
    assert decode(EVIDENCE, logits, split, decision, [["a"]]) == [[("a", *span) for span in expected]]
    assert decode(EVIDENCE, logits, split, decision, [[]]) == [[]]


@pytest.mark.parametrize(
    ("task", "metric"),
    [(task, metric) for task in (MULTI, ANSWER, EVIDENCE) for metric in task.metrics[:3]],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_decision_maximises_the_metric(task: Task, metric: str) -> None:
    """Right and wrong predictions can be separated, but not by the default thresholds."""
    answer = [[0, 0], [3, -9], [-9, 3], [-9, -9], [0, 0], [0, 0], [1, -9], [-9, 1], [-9, -9], [0, 0]]
    evidence = [[0, 0], [-1, -9], [-9, -9], [-1, -9], [0, 0], [0, 0], [-3, -9], [-9, -9], [-9, -9], [0, 0]]
    labelled = [[-2, -5], [-4, -2]]
    logits = {"multi_label": labelled, "span_extraction": answer, "span_per_label": evidence}
    spans = {"a": [(0, 8)], "answer": [(0, 5)]} if task is not MULTI else {}
    text, other = ("x", ["b"]) if task is MULTI else ("xx yy zz", [])
    rows = [example_of(text, labels={"t": ["a"]}, spans=spans, alt_spans=spans)]
    split = make_split([*rows, example_of(text, labels={"t": other})])
    labels = [["a"], []] if task is EVIDENCE else None
    values = np.array(logits[task.kind], np.float32)
    chosen = choose_decision(task, values, split, labels, metric)
    assert score(task, decode(task, values, split, chosen, labels), split.examples)[metric] == 1.0
    assert score(task, decode(task, values, split, DEFAULT, labels), split.examples)[metric] < 1.0
    if metric == task.primary_metric:
        assert choose_decision(task, values, split, labels) == chosen


def test_evidence_after_predicted_classes() -> None:
    """Evidence comes first here, but is decided by the classes that the other task predicts."""
    labels = Task("labels", "multi_label", NAMES)
    tasks = (Task("evidence", "span_per_label", NAMES, evidence_for="labels"), labels)
    both = {"labels", "evidence"}
    found = example_of("xx yy zz", labels={"labels": ["a"]}, spans={"a": [(3, 8)]}, annotated=both)
    split = make_split([found, example_of("xx yy zz", labels={"labels": []}, annotated=both)])
    evidence = np.tile(np.array([[0], [-2], [1], [1], [0]], np.float32), (2, 2))
    logits = {"labels": np.array([[-2, -5], [-4, -5]], np.float32), "evidence": evidence}
    predictions, decisions = decode_tasks(tasks, logits, split)
    assert predictions == {"evidence": [[("a", 3, 8)], []], "labels": [["a"], []]}
    assert decode_tasks(tasks, logits, split, decisions) == (predictions, decisions)
    recall = decisions | {"labels": DecodingThresholds(threshold=0.001)}
    others, used = decode_tasks(tasks, logits, split, recall)
    assert (others["evidence"][1] != [], used) == (True, recall)


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.kind)
def test_default_decision_without_annotations(task: Task) -> None:
    split = make_split([example_of("x y", annotated=set())])
    assert choose_decision(task, random_logits(task, split), split, [["a"]]) == DEFAULT


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.kind)
def test_nonfinite_logits(task: Task, value: float) -> None:
    truth = {"single_label": "a", "regression": 1.0}.get(task.kind, ["a"])
    fields = {"labels": {"t": truth}, "spans": {name: [(0, 1)] for name in task.labels}}
    rows = [example_of(WORDS[:length], **fields) for length in (2, 8, 23)]
    split, labels = make_split(rows, window=4, overlap=1), [["a"]] * 3
    logits = random_logits(task, split)
    for share in (0.3, 1.0):
        logits[np.random.default_rng(1).random(logits.shape) < share] = value
        decision = choose_decision(task, logits, split, labels)
        predictions = decode(task, logits, split, decision, labels)
        assert len(predictions) == len(rows)
        assert all(np.isfinite(list(score(task, predictions, rows).values())))
        assert json.loads(json.dumps(asdict(decision), allow_nan=False)) == asdict(decision)


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.kind)
def test_split_without_text(task: Task) -> None:
    """Truncation may leave only the special tokens of a text."""
    split = make_window("x", [-1, -1], [-1, -1], is_text=False)
    predictions = decode(task, np.full_like(random_logits(task, split), -1.0), split, DEFAULT, [["a"]])
    assert predictions == [{"single_label": "a", "regression": 8.0}.get(task.kind, [])]
