import html
import re
from typing import Any

import pytest
from support.detailed_documents import every_kind

from hpo.report.detailed import Detailed, headline, marked_text


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (["score"], "score 0.712 [0.682, 0.742] (best constant prediction 0.25)"),
        (["tags/f1_micro", "peak_memory_bytes"], "tags/f1_micro 0.610 [0.580, 0.640]"),
        (["peak_memory_bytes"], "score 0.712 [0.682, 0.742] (best constant prediction 0.25)"),
    ],
)
def test_headline_has_the_objectives_or_the_score(metrics: list[str], expected: str) -> None:
    text = headline(Detailed(6, "test", every_kind()), metrics)
    assert text.replace("\u00a0", " ") == f"test, 500 rows: {expected}"


def pieces(marked: str) -> list[tuple[str, str, str]]:
    """Return (class, sign, text) of each mark."""
    found = re.findall(r'<mark class="(\w+)"><b>(.*?)</b>(.*?)</mark>', marked, re.DOTALL)
    return [(look, sign, html.unescape(text).strip()) for look, sign, text in found]


MISSED, SPURIOUS, MIXED = ("missed", "−"), ("spurious", "+"), ("mixed", "− +")


@pytest.mark.parametrize(
    ("truth", "predicted", "expected"),
    [
        ([["a", 0, 3]], [["a", 0, 3]], [("both", "=", "012")]),
        ([["a", 0, 6]], [["a", 4, 8]], [(*MISSED, "0123"), (*MIXED, "45"), (*SPURIOUS, "67")]),
        ([["a", 0, 3], ["a", 3, 6]], [["a", 0, 6]], [(*MIXED, "012"), (*MIXED, "345")]),
        (
            [["a", 0, 3], ["a", 1, 9]],
            [["a", 0, 3]],
            [("both", "=", "0"), ("mixed", "− =", "12"), (*MISSED, "345678")],
        ),
        ([["a", 8, 99]], [["a", -5, 1]], [(*SPURIOUS, "0"), (*MISSED, "89")]),
        ([["a", 4, 4]], None, []),
    ],
    ids=["same", "overlap", "two for one", "one of two", "beyond the text", "empty"],
)
def test_marks_of_spans(truth: list[Any], predicted: Any, expected: list[tuple[str, str, str]]) -> None:
    marked = marked_text("0123456789", truth, predicted, named=False)
    assert pieces(marked) == expected
    assert re.sub("<b>.*?</b>|<.*?>", "", marked) == "0123456789"


def test_marked_text_is_escaped_at_every_cut() -> None:
    text = "<b onclick=x>&amp;</b>\n"
    for end in range(1, len(text)):
        marked = marked_text(text, [["<i>", 0, end]], [], named=True)
        assert set(re.findall("<[^>]*>", marked)) == {'<mark class="missed">', "<b>", "</b>", "</mark>"}
        assert "&lt;i&gt;" in marked
        assert html.unescape(re.sub("<b>.*?</b>|<.*?>", "", marked)) == text
