from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hpo.evaluation.mistakes import MAX_CHARACTERS, worst_mistakes
from hpo.tasks.example import Example
from hpo.tasks.kind import Task

LABELS = ("a", "b", "c")
SLOTS = Task("t", "token_classification", LABELS)
ANSWER = Task("t", "span_extraction", ("answer",))


def example(row_id: str, truth: Any = None, text: str = "a text", **fields: Any) -> Example:
    return Example(row_id, text, {"t": truth}, fields.pop("spans", {}), annotated=frozenset("t"), **fields)


def test_the_class_that_was_thought_least_likely_is_the_worst() -> None:
    p_NC = np.array([[0.6, 0.3, 0.1], [0.6, 0.1, 0.3], [0.9, 0.1, 0.0], [0.5, 0.0, 0.5], [0.6, 0.3, 0.1]])
    rows = [example(str(i), truth) for i, truth in enumerate("bbabb")]
    found = worst_mistakes(Task("t", "single_label", LABELS), ["a"] * 5, rows, p_NC)
    assert [(one.id, one.truth, one.predicted) for one in found] == [
        ("3", "b", "a"),
        ("1", "b", "a"),
        ("0", "b", "a"),
        ("4", "b", "a"),
    ]
    assert [one.loss for one in found[1:]] == pytest.approx([-math.log(p) for p in (0.1, 0.3, 0.3)])
    assert math.isfinite(found[0].loss)


def test_the_loss_of_several_classes_is_the_sum_of_their_cross_entropies() -> None:
    p_NC = np.array([[0.9, 0.2, 0.4], [0.9, 0.8, 0.1], [1.0, 0.0, 0.0]])
    rows = [example("0", ["c", "a"]), example("1", ["b"]), example("2", ["a"])]
    found = worst_mistakes(Task("t", "multi_label", LABELS), [["a"], ["a", "b"], ["a"]], rows, p_NC)
    assert [(one.id, one.truth, one.predicted) for one in found] == [
        ("1", ["b"], ["a", "b"]),
        ("0", ["a", "c"], ["a"]),
    ]
    losses = [-math.log(0.1 * 0.8 * 0.9), -math.log(0.9 * 0.8 * 0.4)]
    assert [one.loss for one in found] == pytest.approx(losses)


@pytest.mark.parametrize("kind", ["single_label", "multi_label"])
def test_losses_in_pieces_are_those_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    p_NC = rng.dirichlet([1.0] * 3, 50)
    labels = rng.choice(LABELS, (2, 50)).tolist()
    truth, predicted = labels if kind == "single_label" else [[[one] for one in side] for side in labels]
    rows = [example(str(i), one) for i, one in enumerate(truth)]
    task = Task("t", kind, LABELS)
    whole = worst_mistakes(task, predicted, rows, p_NC)
    monkeypatch.setattr("hpo.tasks.labels._AT_ONCE", 4 * 3)
    assert worst_mistakes(task, predicted, rows, p_NC) == whole
    assert len(whole) == 20


def test_numbers_are_sorted_by_their_distance() -> None:
    rows = [example(str(i), float(i)) for i in range(4)]
    found = worst_mistakes(Task("t", "regression"), [0.0, 3.0, 1.0, float("nan")], rows, None)
    assert [(one.id, one.truth, one.predicted, one.loss) for one in found] == [
        ("1", 1.0, 3.0, 2.0),
        ("2", 2.0, 1.0, 1.0),
    ]


def test_missed_and_spurious_spans_are_counted() -> None:
    rows = [
        example("0", spans={"a": [(0, 1)]}),
        example("1", spans={"a": [(0, 1)], "b": [(2, 6)]}),
        example("2"),
        example("3"),
    ]
    predicted = [[("a", 0, 1)], [("c", 2, 6), ("a", 0, 1)], [("a", 2, 4)], []]
    found = worst_mistakes(SLOTS, predicted, rows, None)
    assert [(one.id, one.loss) for one in found] == [("1", 2.0), ("2", 1.0)]
    assert found[0].truth == [["a", 0, 1], ["b", 2, 6]]
    assert found[0].predicted == [["a", 0, 1], ["c", 2, 6]]


def test_an_accepted_answer_is_no_mistake() -> None:
    text = "one two three"
    fields: dict[str, Any] = {
        "spans": {"answer": [(0, 3)]},
        "alt_spans": {"answer": [(0, 3), (4, 7)]},
        "text": text,
    }
    rows = [example(str(i), **fields) for i in range(3)] + [example("3", text=text), example("4", text=text)]
    predicted = [[("answer", 4, 7)], [("answer", 4, 13)], [], [("answer", 0, 3)], []]
    found = worst_mistakes(ANSWER, predicted, rows, None)
    assert [(one.id, one.truth, one.predicted, one.loss) for one in found] == [
        ("1", [["answer", 0, 3]], [["answer", 4, 13]], 2.0),
        ("2", [["answer", 0, 3]], [], 1.0),
        ("3", [], [["answer", 0, 3]], 1.0),
    ]


def test_a_long_text_is_shown_around_its_first_wrong_span() -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(5000))
    rows = [example("0", text=text, spans={"a": [(10, 20), (3000, 3050), (3100, 4900)]})]
    (one,) = worst_mistakes(SLOTS, [[("a", 10, 20), ("b", 3000, 3050), ("a", 3100, 4900)]], rows, None)
    assert len(one.text) == MAX_CHARACTERS
    (name, start, end), (cut_name, cut_start, cut_end) = one.truth
    assert (name, one.text[start:end]) == ("a", text[3000:3050])
    assert cut_name == "a"
    assert cut_end == MAX_CHARACTERS
    assert text.startswith(one.text[cut_start:], 3100)
    assert one.predicted[0] == ["b", start, end]
    assert text[one.text_start :].startswith(one.text)
    assert (start + one.text_start, end + one.text_start) == (3000, 3050)
    assert one.num_outside == 0
    (last,) = worst_mistakes(SLOTS, [[("a", 4995, 5000)]], [example("0", text=text)], None)
    ((name, start, end),) = last.predicted
    assert last.text[start:end] == text[4995:]
    (plain,) = worst_mistakes(Task("t", "regression"), [1.0], [example("0", 2.0, text)], None)
    assert plain.text == text[:MAX_CHARACTERS]
    assert (plain.text_start, plain.num_outside) == (0, 0)


def test_wrong_spans_outside_of_the_excerpt_are_counted() -> None:
    rows = [example("0", text="x" * 5000, spans={"a": [(500, 510), (1250, 1400), (4000, 4001)]})]
    (one,) = worst_mistakes(SLOTS, [[("b", 4900, 4999), ("a", 4000, 4001)]], rows, None)
    assert (one.text_start, one.loss) == (300, 3.0)
    # Of the truth the one that the end of the excerpt cuts; of the predicted ones all of it is outside.
    assert one.num_outside == 2
    assert one.truth == [["a", 200, 210], ["a", 950, 1000]]
    assert one.predicted == []
