from __future__ import annotations

import html
import re
from typing import Any

import pytest

from hpo.report.marked import marked_labels, marked_text


def pieces(marked: str) -> list[tuple[str, str, str]]:
    """(class, sign, text) of each mark."""
    found = re.findall(r'<mark class="(\w+)"><b>(.*?)</b>(.*?)</mark>', marked, re.DOTALL)
    return [(look, sign, html.unescape(text).strip()) for look, sign, text in found]


@pytest.mark.parametrize(
    ("truth", "predicted", "expected"),
    [
        ([["a", 0, 3]], [["a", 0, 3]], [("both", "=", "012")]),
        ([["a", 0, 3]], [], [("missed", "−", "012")]),
        ([], [["a", 7, 10]], [("spurious", "+", "789")]),
        (
            [["a", 0, 6]],
            [["a", 4, 8]],
            [("missed", "−", "0123"), ("mixed", "− +", "45"), ("spurious", "+", "67")],
        ),
        (
            [["a", 1, 9]],
            [["a", 3, 5]],
            [("missed", "−", "12"), ("mixed", "− +", "34"), ("missed", "−", "5678")],
        ),
        ([["a", 0, 3], ["a", 3, 6]], [["a", 0, 6]], [("mixed", "− +", "012"), ("mixed", "− +", "345")]),
        (
            [["a", 0, 3], ["a", 1, 9]],
            [["a", 0, 3]],
            [("both", "=", "0"), ("mixed", "− =", "12"), ("missed", "−", "345678")],
        ),
        ([["a", 0, 3], ["a", 3, 5]], [], [("missed", "−", "012"), ("missed", "−", "34")]),
        ([["a", 8, 99]], [["a", -5, 1]], [("spurious", "+", "0"), ("missed", "−", "89")]),
        ([["a", 4, 4]], [], []),
    ],
    ids=[
        "same",
        "missed",
        "spurious",
        "overlap",
        "inside",
        "two for one",
        "one of two",
        "adjacent",
        "beyond the text",
        "empty",
    ],
)
def test_marks_of_one_name(
    truth: list[Any], predicted: list[Any], expected: list[tuple[str, str, str]]
) -> None:
    marked = marked_text("0123456789", truth, predicted, named=False)
    assert pieces(marked) == expected
    assert re.sub("<b>.*?</b>|<.*?>", "", marked) == "0123456789"


def test_marks_of_several_names_say_each() -> None:
    marked = marked_text("0123456789", [["a", 0, 6], ["b", 2, 4]], [["b", 2, 8]], named=True)
    assert pieces(marked) == [
        ("missed", "−a", "01"),
        ("mixed", "−a −b +b", "23"),
        ("mixed", "−a +b", "45"),
        ("spurious", "+b", "67"),
    ]


def test_a_text_is_text_wherever_a_span_cuts_it() -> None:
    text = "<b onclick=x>&amp;</b>\n"
    for end in range(1, len(text)):
        marked = marked_text(text, [["<i>", 0, end]], [], named=True)
        tags = set(re.findall("<[^>]*>", marked))
        assert tags == {'<mark class="missed">', "<b>", "</b>", "</mark>"}
        assert "&lt;i&gt;" in marked
        assert html.unescape(re.sub("<b>.*?</b>|<.*?>", "", marked)) == text


@pytest.mark.parametrize(
    ("truth", "predicted", "expected"),
    [
        ("a", "b", [("missed", "−", "a"), ("spurious", "+", "b")]),
        (["a", "b"], ["b", "c"], [("missed", "−", "a"), ("spurious", "+", "c"), ("both", "=", "b")]),
        ([], ["<c>"], [("spurious", "+", "<c>")]),
        (["a"], None, [("missed", "−", "a")]),
    ],
)
def test_marks_of_labels(truth: Any, predicted: Any, expected: list[tuple[str, str, str]]) -> None:
    assert pieces(marked_labels(truth, predicted)) == expected
    assert marked_labels([], []) == "none"
