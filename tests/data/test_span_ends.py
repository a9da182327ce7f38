"""Detection of spans with wrong offsets."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load_set, write_set

from hpo.data.checks import data_facts
from hpo.data.span_ends import OddSpans, SpanEnds

WHO: dict[str, Any] = {"who": {"kind": "token_classification", "span_names": ["name"]}}
TEXTS = [
    "Zoë met Ann Lee in Rome.",
    "The 😀 of “Lee”, 45 years old, met José's aunt",
    "Ann, 2024: naïve café in Łódź",
]
NAMES = re.compile(r"Ann Lee|Ann|Lee|Rome|José|café|Łódź|45|2024")


def odd(shift: Callable[[str, int, int], tuple[int, int]], texts: list[str] = TEXTS) -> OddSpans | None:
    """Return the odd spans of names moved by `shift`, without spans beyond the text."""
    ends = SpanEnds()
    for text in texts:
        for match in NAMES.finditer(text):
            start, end = shift(text, *match.span())
            if 0 <= start < end <= len(text):
                ends.add("row", text, start, end)
    assert ends.num_spans >= 3
    return ends.odd()


@pytest.mark.parametrize(
    ("shift", "cause"),
    [
        (lambda _, a, b: (a, b - 1), "the end is the last character of the span"),
        (lambda _, a, b: (a + 1, b + 1), "offsets are counted from 1"),
        (lambda _, a, b: (a - 1, b - 1), "offsets are one too small"),
        (lambda _, a, b: (a + 1, b), "starts are counted from 1"),
        (lambda text, a, b: (len(text[:a].encode()), len(text[:b].encode())), "offsets count bytes of UTF-8"),
        (
            lambda text, a, b: tuple(len(text[:at].encode("utf-16-le")) // 2 for at in (a, b)),
            "offsets count UTF-16 units",
        ),
    ],
)
def test_a_systematic_mistake_is_named(shift: Callable[[str, int, int], tuple[int, int]], cause: str) -> None:
    texts = ["Hey 😀, Ann Lee met Rome and José"] * 3 if "UTF-16" in cause else TEXTS
    found = odd(shift, texts)
    assert found is not None
    assert str(found.cause).startswith(cause)


def test_right_spans_are_not_odd() -> None:
    assert odd(lambda _, a, b: (a, b)) is None


@pytest.mark.parametrize(
    ("text", "start", "end", "num"),
    [
        ("東京に行きました", 0, 2, 0),
        ("ไปกรุงเทพ", 2, 9, 0),
        ("서울에서 만나요", 0, 2, 0),
        ("وللقاهرة", 3, 8, 0),
        ("take 10mg", 5, 7, 0),
        ("#BlackLives", 6, 11, 0),
        ("anti-war", 5, 8, 0),
        ("Ann's", 0, 3, 0),
        ("(Ann)", 1, 4, 0),
        ("naïve", 0, 3, 1),
        ("nai\u0308ve", 0, 3, 1),
        ("Москва", 0, 5, 1),
        ("in 2024", 3, 6, 1),
        ("an Ann", 2, 6, 1),
        ("a\u00a0b", 0, 2, 1),
    ],
)
def test_words_end_where_their_script_ends_them(text: str, start: int, end: int, num: int) -> None:
    ends = SpanEnds()
    ends.add("row", text, start, end)
    assert ends.num_odd == num


def test_few_odd_spans_are_not_reported() -> None:
    ends = SpanEnds()
    for number in range(100):
        ends.add(f"row{number}", "Annabel", 0, 3 if number < 4 else 7)
    assert ends.odd() is None
    ends.add("row", "Annabel", 0, 3)
    ends.add("row", "Annabel", 0, 3)
    assert ends.odd() == OddSpans(102, 6, "row0", "[Ann]abel", None)


def test_odd_spans_are_facts_of_their_task(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "text": "so Ann\nmet", "spans": {"name": [[2, 5]]}} for n in range(4)]
    write_set(tmp_path, WHO, train=rows, validation=[{**row, "id": f"v{row['id']}"} for row in rows])
    (task,) = data_facts(load_set(tmp_path)).tasks
    assert task.odd_spans == OddSpans(8, 8, "r0", "so[ An]n met", "offsets are one too small: add 1 to each")


@pytest.mark.parametrize("name", ["snips", "squad2", "nlupp", "sgd"])
def test_spans_of_published_sets_are_not_odd(name: str, real_set: Callable[[str], Path]) -> None:
    facts = data_facts(load_set(real_set(name)))
    assert [task.odd_spans for task in facts.tasks] == [None] * len(facts.tasks)
