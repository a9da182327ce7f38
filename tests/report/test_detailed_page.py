"""Detailed evaluations as tables, as a section of the page, and as marks in a text."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path
from typing import Any

import pytest
from support.browser import without_plotly
from support.detailed_documents import (
    class_row,
    document,
    error,
    every_kind,
    single_label,
    task_document,
)
from support.study_records import fake_trial, record_of

from hpo.report.detailed import HEADING, Detailed, headline, marked_text
from hpo.report.report import write_report

HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&`$"


def write(folder: Path, *documents: dict[str, Any], **changes: Any) -> Path:
    """Write the report of a study with these detailed evaluations of its best trial, number 6."""
    by_split = {one["split"]: one for one in documents}
    record = record_of([dataclasses.replace(fake_trial(6, "fp32"), detailed=by_split)])
    return write_report(
        dataclasses.replace(record, definition=record.definition | changes), folder, "my study.yaml"
    )


def section(path: Path) -> str:
    text = without_plotly(path)
    return text[text.index(f"<h2>{HEADING}") : text.index("<h2>Before you draw")]


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


# The page


def test_hostile_documents_are_escaped(tmp_path: Path) -> None:
    topic = single_label([HOSTILE, "b"], worst=[error(HOSTILE, HOSTILE, HOSTILE, "b")], warnings=[HOSTILE])
    spans = [[HOSTILE, 3, 20]], [[HOSTILE, 10, 40], ["b", 2, 5]]
    phrases = task_document(
        "token_classification",
        {HOSTILE: 0.5},
        classes=[class_row(HOSTILE, 1, 2, 3), class_row("b", 1, 1, 1)],
        worst=[error("1", HOSTILE, *spans)],
    )
    text = section(write(tmp_path, document({HOSTILE: topic, "phrases": phrases}, decided_on=HOSTILE)))
    assert not re.search("<script>window|<img src=x", text)
    assert "&lt;script&gt;window.hacked=1&lt;/script&gt;" in text


# Marks


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
