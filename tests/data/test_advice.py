"""Advice from the facts of a data set."""

from collections.abc import Mapping
from typing import Any

import pytest

from hpo.config.study_config import StudyConfig
from hpo.data.checks import CutFacts, DataFacts, Leak, LengthFacts, SplitFacts, TaskFacts, data_advice
from hpo.data.span_ends import OddSpans

SPLITS = ("train", "validation")
ROWS = dict.fromkeys(SPLITS, 100)


def task(labels: Mapping[str, int], kind: str = "single_label", **facts: Any) -> TaskFacts:
    """Return the facts of a task with these numbers of rows of each class in both splits."""
    given = {"num_rows": ROWS, "num_annotated": ROWS, "counts": {one: dict(labels) for one in SPLITS}}
    return TaskFacts("tone", kind, tuple(labels), **(given | facts))


def advice(
    *tasks: TaskFacts,
    leaks: list[Leak] | None = None,
    lost: int = 0,
    over: int = 0,
    study: Mapping[str, Any] | None = None,
    **data: Any,
) -> list[str]:
    """Return the advice about tasks, with `lost` of 100 spans and `over` of 200 texts at `max_length` 16."""
    rows = dict.fromkeys(SPLITS, SplitFacts(100, 0))
    cut = CutFacts(16, {"train": over}, {"train": 100}, {"who": {"train": lost}})
    lengths = LengthFacts(ROWS, {"train": [45] * 101}, {"who": {"train": 100}}, [cut])
    source = {"source": "synthetic", **data}
    config = StudyConfig.model_validate({"name": "s", "data": source, **(study or {})})
    return data_advice(DataFacts(rows, tasks, leaks or [], {}), lengths, config)


def test_good_data_need_no_advice() -> None:
    assert advice(task({"calm": 50, "angry": 50})) == []


LEAK = [Leak("validation", "train", 2, ("v1", "r1"))]
CSV = {"source": "csv", "path": "x", "tasks": {"tone": {"kind": "multi_label"}}}
EQUAL = dict.fromkeys(("minimum", "maximum"), 5.0)
BOTH = {"calm": 1, "angry": 1}


@pytest.mark.parametrize(
    ("facts", "more", "text"),
    [
        ([], {"leaks": LEAK}, "2 of 100 texts (2.0 %) of validation are in train too (row `v1` is `r1`)"),
        ([], {"over": 50}, "50 of 200 texts (25.0 %) of the data are cut at `max_length` 16: set"),
        ([], {"lost": 100}, "100 of 100 spans (100.0 %) of `who` are lost at `max_length` 16: set"),
        ([], {"lost": 100, "long_text": "window"}, "are lost at `max_length` 16: raise `data.stride`."),
        ([task(BOTH, num_annotated=ROWS | {"train": 4})], {}, "96 of 100 rows (96.0 %) of train are not"),
        (
            [task(BOTH, num_annotated=ROWS | {"train": 1}, num_rows={"train": 1, "validation": 9})],
            {},
            "be learnt",
        ),
        ([task({"calm": 0, "angry": 1})], {}, "`tone`: no row has `calm`: is the spelling that of the data?"),
        (
            [task(BOTH, counts={"train": BOTH, "validation": {"calm": 1, "angry": 0}})],
            {},
            "its metrics say noth",
        ),
        (
            [task(BOTH, counts={"train": {"calm": 1, "angry": 0}, "validation": BOTH})],
            {},
            "no model can learn",
        ),
        ([task({}, "regression", numbers={"train": EQUAL})], {}, "all 100 numbers of train are 5: there is"),
        ([task({}, "regression", numbers={"validation": EQUAL})], {}, "numbers of validation are 5: r2 is"),
        (
            [task({}, "regression", num_annotated={"train": 9, "validation": 1})],
            {},
            "validation has no `score`",
        ),
        ([task(BOTH, "multi_label", num_empty={"train": 99})], CSV, "set `data.csv.empty: unlabelled`."),
        ([task(BOTH, odd_spans=OddSpans(9, 4, "r2", "[Ann]a"))], {}, "`tone`: 4 of 9 spans (44.4 %) begin"),
    ],
)
def test_a_fault_of_the_data_is_reported(facts: list[TaskFacts], more: dict[str, Any], text: str) -> None:
    found = advice(*facts, **more)
    assert sum(text in one for one in found) == 1, found


ALIKE = [("Ice cream", "ice-cream"), ("caf\u00e9", "cafe\u0301"), ("late", "la\u200bte"), ("1", "1.0")]
OTHER = [("A", "A-"), ("1-2", "12"), ("-1", "1"), ("5.1", "5.10"), ("late", "later")]


def test_similar_classes_are_reported() -> None:
    for one, other in ALIKE:
        (text,) = advice(task({one: 1, other: 1}))
        assert "are different classes, but" in text
    assert [advice(task({one: 1, other: 1})) for one, other in OTHER] == [[]] * len(OTHER)
