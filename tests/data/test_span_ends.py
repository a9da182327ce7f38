"""Detection of spans with wrong offsets."""

from pathlib import Path

import pytest
from support.jsonl_sets import load_set, write_set

from hpo.data.checks import data_facts
from hpo.data.span_ends import SpanEnds


@pytest.mark.parametrize(
    ("text", "start", "end", "num"),
    [
        ("東京に行きました", 0, 2, 0),
        ("ไปกรุงเทพ", 2, 9, 0),
        ("وللقاهرة", 3, 8, 0),
        ("take 10mg", 5, 7, 0),
        ("anti-war", 5, 8, 0),
        ("(Ann)", 1, 4, 0),
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


def test_odd_spans_are_facts_of_their_task(tmp_path: Path) -> None:
    tasks = {"who": {"kind": "token_classification", "span_names": ["name"]}}
    rows = [{"id": f"r{n}", "text": "so Ann\nmet", "spans": {"name": [[2, 5]]}} for n in range(8)]
    write_set(tmp_path, tasks, train=rows[:4], validation=rows[4:])
    (task,) = data_facts(load_set(tmp_path)).tasks
    (warning,) = task.span_warnings
    assert warning.startswith(
        "8 of 8 spans (100.0 %) begin or end inside a word or at a space, as in `so[ An]n"
    )
    assert "(row `r0`)" in warning
