"""Predictions from logits, and the thresholds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from operator import itemgetter
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


def words_of(split: Any) -> list[list[int]]:
    """Each example's owned tokens (indices into T), in order."""
    tokens: list[list[int]] = [[] for _ in split.examples]
    for w, example in enumerate(split.window_example_W):
        for t in range(split.window_start_W1[w], split.window_start_W1[w + 1]):
            if split.owned_T[t]:
                tokens[example].append(t)
    return tokens


def logits_shape(task: Task, split: Any) -> tuple[int, int]:
    return len(split.window_example_W if task.level == "sequence" else split.owned_T), task.num_outputs


def random_rows(rng: np.random.Generator, count: int, longest: int = 14) -> list[Example]:
    return [
        example_of(" ".join("w" * int(rng.integers(1, 5)) for _ in range(rng.integers(1, longest))))
        for _ in range(count)
    ]


def one_hot(tags: Sequence[int], num_classes: int) -> Any:
    return 5 * np.eye(num_classes, dtype=np.float32)[list(tags)]


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
def test_windows_of_one_text(
    task: Task, decision: DecodingThresholds, logits: list[list[float]], expected: list[Any]
) -> None:
    split = make_split([example_of("x y"), example_of("z")], window=1)
    assert split.window_example_W.tolist() == [0, 0, 1]
    assert decode(task, np.array(logits, np.float32), split, decision) == expected


def bio_reference(tags: list[tuple[str, str]]) -> list[tuple[str, int, int]]:
    """Spans of tags (prefix, name), one token at a time."""
    spans: list[list[Any]] = []
    open_name = ""
    for i, (prefix, name) in enumerate(tags):
        if prefix != "O" and (prefix == "B" or name != open_name):
            spans.append([name, i, i])
        elif prefix == "I":
            spans[-1][2] = i
        open_name = name
    return [tuple(span) for span in spans]


@pytest.mark.parametrize(("window", "overlap"), [(1000, 0), (5, 2)])
@pytest.mark.parametrize("task", [SLOTS, OVERLAPPING], ids=["joint", "overlapping"])
@pytest.mark.parametrize("seed", range(2))
def test_bio_tags_equal_a_plain_loop(task: Task, window: int, overlap: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    split = make_split(random_rows(rng, 30), window, overlap)
    logits = rng.normal(size=(len(split.owned_T), task.num_outputs)).astype(np.float32)
    expected = []
    for tokens in words_of(split):
        found = []
        for n, name in enumerate(NAMES):
            tags = []
            for t in tokens:
                if task.spans_may_overlap:
                    tag = int(logits[t, 3 * n : 3 * n + 3].argmax())
                else:
                    tag = int(logits[t].argmax()) - 2 * n
                    tag = tag if tag in (1, 2) else 0
                tags.append(("OBI"[tag], name if tag else ""))
            found += [
                (n, split.char_start_T[tokens[i]], split.char_end_T[tokens[j]])
                for n, i, j in bio_reference(tags)
            ]
        expected.append(sorted(found, key=itemgetter(1, 2, 0)))
    assert decode(task, logits, split, DEFAULT) == expected
    assert sum(map(len, expected)) > 30


def test_no_span_across_reordered_segments() -> None:
    # The second segment of the text comes first, as in a pair (question, context) of a text that ends
    # with the question.
    split = make_window("xx yy zz uu", [6, 9, 0, 3], [8, 11, 2, 5])
    assert decode(SLOTS, one_hot([1, 2, 2, 2], 5), split, DEFAULT) == [[("a", 0, 5), ("a", 6, 11)]]


def test_spans_without_outer_white_space() -> None:
    split = make_window("x  yy z", [0, 1, 3, 5], [1, 3, 6, 7])
    assert decode(SLOTS, one_hot([0, 1, 2, 0], 5), split, DEFAULT) == [[("a", 3, 5)]]
    assert decode(SLOTS, one_hot([0, 1, 0, 0], 5), split, DEFAULT) == [[]]


def answer_reference(split: Any, logits: Any) -> list[tuple[float, list[tuple[str, int, int]]]]:
    """For each example the best margin over no answer and its span, pair by pair."""
    best: list[tuple[float, list[tuple[str, int, int]]]] = [(-np.inf, []) for _ in split.examples]
    for w, example in enumerate(split.window_example_W):
        first, last = split.window_start_W1[w], split.window_start_W1[w + 1]
        low, high = split.examples[example].segments["context"]
        null = float(logits[first, 0]) + float(logits[first, 1])
        for i, j in itertools.combinations_with_replacement(range(first, last), 2):
            inside = all(split.char_start_T[t] >= low and 0 <= split.char_end_T[t] <= high for t in (i, j))
            margin = float(logits[i, 0]) + float(logits[j, 1]) - null
            if inside and split.owned_T[i] and j - i < MAX_ANSWER_TOKENS and margin > best[example][0]:
                best[example] = (margin, [("answer", int(split.char_start_T[i]), int(split.char_end_T[j]))])
    return best


@pytest.mark.parametrize(("window", "overlap"), [(1000, 0), (40, 10)])
@pytest.mark.parametrize("seed", range(2))
def test_answers_equal_all_pairs(window: int, overlap: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for row in random_rows(rng, 8, longest=90):
        context = row.text.find(" ") + 1
        rows.append(
            example_of(row.text, segments={"question": (0, context), "context": (context, len(row.text))})
        )
    split = make_split(rows, window, overlap)
    logits = rng.normal(size=(len(split.owned_T), 2)).astype(np.float32)
    # Far-off pairs that the bound on the length has to refuse.
    logits[split.window_start_W1[1:] - 2, 1] += 3
    expected = answer_reference(split, logits)
    for offset in (-100.0, 0.0, 4.0, 100.0):
        wanted = [spans if margin > offset else [] for margin, spans in expected]
        assert decode(ANSWER, logits, split, DecodingThresholds(null_offset=offset)) == wanted


def evidence_reference(
    split: Any, logits: Any, labels: list[list[str]], threshold: float, gap: int
) -> list[Any]:
    """Evidence of each example and class, one token at a time."""
    predictions = []
    for tokens, names in zip(words_of(split), labels, strict=True):
        found = []
        for name in names:
            p = [1 / (1 + np.exp(-float(logits[t, NAMES.index(name)]))) for t in tokens]
            limit = threshold if max(p) > threshold else max(p) / 2
            runs: list[list[int]] = []
            for i in range(len(p)):
                if p[i] > limit:
                    if runs and i - runs[-1][1] - 1 <= gap:
                        runs[-1][1] = i
                    else:
                        runs.append([i, i])
            if max(p) <= threshold:
                runs = [run for run in runs if max(p[run[0] : run[1] + 1]) == max(p)]
            found += [(name, split.char_start_T[tokens[i]], split.char_end_T[tokens[j]]) for i, j in runs]
        predictions.append(sorted(found, key=itemgetter(1, 2, 0)))
    return predictions


@pytest.mark.parametrize(("window", "overlap"), [(1000, 0), (5, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_evidence_equals_a_plain_loop(window: int, overlap: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    split = make_split(random_rows(rng, 30), window, overlap)
    logits = rng.normal(-1, 1.5, size=(len(split.owned_T), 2)).astype(np.float32)
    labels = [[name for name in NAMES if rng.random() < 0.6] for _ in split.examples]
    for threshold, gap in itertools.product((0.2, 0.5, 0.95), (0, 1, 3)):
        ours = decode(EVIDENCE, logits, split, DecodingThresholds(threshold=threshold, merge_gap=gap), labels)
        assert ours == evidence_reference(split, logits, labels, threshold, gap)
        for spans, names in zip(ours, labels, strict=True):
            assert {name for name, _, _ in spans} == set(names)


@pytest.mark.parametrize(
    ("task", "metric"),
    [(task, metric) for task in (MULTI, ANSWER, EVIDENCE) for metric in task.metrics],
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
    labels = Task("labels", "multi_label", NAMES)
    evidence = Task("evidence", "span_per_label", NAMES, evidence_for="labels")
    both = {"labels", "evidence"}
    rows = [
        example_of("xx yy zz", labels={"labels": ["a"]}, spans={"a": [(3, 8)]}, annotated=both),
        example_of("xx yy zz", labels={"labels": []}, annotated=both),
    ]
    split = make_split(rows)
    logits = {
        "labels": np.array([[-2, -5], [-4, -5]], np.float32),
        "evidence": np.tile(np.array([[0], [-2], [1], [1], [0]], np.float32), (2, 2)),
    }
    # Evidence comes first, but is decided by the classes that the other task predicts.
    tasks = (evidence, labels)
    predictions, decisions = decode_tasks(tasks, logits, split)
    assert list(decisions) == ["evidence", "labels"]
    assert predictions == {"evidence": [[("a", 3, 8)], []], "labels": [["a"], []]}
    assert decode_tasks(tasks, logits, split, decisions) == (predictions, decisions)
    recall = decisions | {"labels": DecodingThresholds(threshold=0.001)}
    others, used = decode_tasks(tasks, logits, split, recall)
    assert others["evidence"][1] != []
    assert used == recall


@pytest.mark.parametrize(
    ("task", "annotated"), [*((task, ()) for task in ALL), *((task, "t") for task in (SINGLE, NUMBER, SLOTS))]
)
def test_default_decision(task: Task, annotated: Iterable[str]) -> None:
    split = make_split([example_of("x y", annotated=set(annotated))])
    logits = np.ones(logits_shape(task, split), np.float32)
    assert choose_decision(task, logits, split, [["a"]]) == DEFAULT


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.kind)
def test_nonfinite_logits(task: Task, value: float) -> None:
    rng = np.random.default_rng(0)
    truth = {"single_label": "a", "regression": 1.0}.get(task.kind, ["a"])
    fields = {"labels": {"t": truth}, "spans": {name: [(0, 1)] for name in task.labels}}
    rows = [example_of(row.text, **fields) for row in random_rows(rng, 6)]
    split = make_split(rows, window=4, overlap=1)
    logits = rng.normal(size=logits_shape(task, split)).astype(np.float32)
    for share in (0.3, 1.0):
        logits[rng.random(logits.shape) < share] = value
        labels = [["a"]] * len(rows)
        decision = choose_decision(task, logits, split, labels)
        predictions = decode(task, logits, split, decision, labels)
        assert len(predictions) == len(rows)
        assert all(np.isfinite(list(score(task, predictions, rows).values())))
        assert json.loads(json.dumps(asdict(decision), allow_nan=False)) == asdict(decision)


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.kind)
def test_split_without_text(task: Task) -> None:
    # A text of which truncation left the special tokens alone.
    split = make_window("x", [-1, -1], [-1, -1], is_text=False)
    predictions = decode(task, np.full(logits_shape(task, split), -1.0, np.float32), split, DEFAULT, [["a"]])
    assert predictions == [{"single_label": "a", "regression": 8.0}.get(task.kind, [])]
