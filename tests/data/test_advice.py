"""Advice from the facts of a data set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import write_set
from support.tiny_tokenizers import tiny_tokenizer

from hpo.config.study_config import StudyConfig
from hpo.data.advice import _inferred_classes, _similar_classes, _unlabelled, data_advice
from hpo.data.checks import TaskFacts, data_facts, length_facts
from hpo.data.dataset import load_data
from hpo.tasks.tokenized_split import Windowing

TONE: dict[str, Any] = {"tone": {"kind": "single_label", "classes": ["calm", "angry"]}}


def rows(num: int, first: int = 0, **labels: Any) -> list[dict[str, Any]]:
    """Return rows of distinct texts with the same labels."""
    return [{"id": f"r{n}", "text": f"text {n}", "labels": labels} for n in range(first, first + num)]


def both(num: int, first: int = 0) -> list[dict[str, Any]]:
    """Return as many calm rows as angry ones."""
    return [*rows(num, first, tone="calm"), *rows(num, first + num, tone="angry")]


GOOD = {"train": both(60), "validation": both(60, 1000), "test": both(60, 2000)}


def study(folder: Path, tasks: Any = TONE, splits: Any = GOOD, **keys: Any) -> StudyConfig:
    """Return a study of a jsonl set."""
    write_set(folder / "set", tasks, **splits)
    data = {"source": "jsonl", "path": str(folder / "set"), **keys.pop("data", {})}
    return StudyConfig.model_validate({"name": "s", "data": data, **keys})


def advice(config: StudyConfig, folder: Path) -> list[str]:
    dataset = load_data(config.data)
    lengths = length_facts(
        dataset,
        tiny_tokenizer("wordpiece"),
        [Windowing(config.training.max_length, config.data.long_text, 4)],
        folder / "cache",
    )
    return data_advice(data_facts(dataset), lengths, config)


def test_good_data_need_no_advice(tmp_path: Path) -> None:
    assert advice(study(tmp_path), tmp_path) == []


LEAKED = [{**row, "id": f"v{row['id']}"} for row in both(60, 118)]
LONG = [{**row, "text": "word " * 40 + row["id"]} for row in both(60)]
OPEN = [{"id": f"o{n}", "text": f"open {n}", "labels": {}} for n in range(200)]
THREE: dict[str, Any] = {"tone": {"kind": "single_label", "classes": ["calm", "angry", "glad"]}}
NUMBER: dict[str, Any] = {"size": {"kind": "regression"}}
GLAD = GOOD | {
    split: GOOD[split] + rows(9, at, tone="glad") for split, at in {"train": 3000, "test": 4000}.items()
}
BOTH_TASKS: dict[str, Any] = {
    "train": [{**row, "labels": {"tone": "calm", "size": n}} for n, row in enumerate(both(9))]
    + both(60, 100),
    "validation": rows(1, 1000, size=1) + rows(1, 1001, size=2) + both(3, 2000),
    "test": rows(1, 3000, tone="calm", size=1) + both(9, 4000),
}


def numbers(first: int, *values: float) -> list[dict[str, Any]]:
    return [row for n, value in enumerate(values) for row in rows(1, first + n, size=value)]


@pytest.mark.parametrize(
    ("tasks", "splits", "text"),
    [
        (
            TONE,
            GOOD | {"validation": LEAKED},
            "2 of 120 texts (1.7 %) of validation are in train too (row `vr118`",
        ),
        (
            TONE,
            GOOD | {"train": LONG},
            "120 of 360 texts (33.3 %) of the data are cut at `max_length` 16: set",
        ),
        (TONE, GOOD | {"test": OPEN}, "200 of 200 rows (100.0 %) of test are not labelled for `tone`"),
        (
            TONE,
            GOOD | {"train": rows(60, tone="calm")},
            "`tone`: no row of train has `angry`: no model can learn",
        ),
        (THREE, GOOD, "`tone`: no row has `glad`: is the spelling that of the data?"),
        (THREE, GLAD, "`tone`: no row of validation has `glad`: its metrics say nothing of it. Label rows"),
        (
            NUMBER,
            {"train": numbers(0, 1, 2, 3), "validation": numbers(1000, 7, 7, 7)},
            "`size`: all 3 numbers of validation are 7: r2 is 0 or 1 there",
        ),
        (
            NUMBER,
            {"train": numbers(0, 5, 5, 5), "validation": numbers(1000, 7, 8)},
            "`size`: all 3 numbers of train are 5: there is nothing to learn",
        ),
        (
            TONE | NUMBER,
            BOTH_TASKS,
            "test has no `score`, since it has 1 labelled row of `size`: label more.",
        ),
        (
            TONE,
            GOOD | {"test": [*rows(1, 3000, tone="calm"), *OPEN[:3]]},
            "test has 1 labelled row of `tone`: nothing can be learnt or measured.",
        ),
    ],
)
def test_a_fault_of_the_data_is_reported(
    tasks: dict[str, Any], splits: dict[str, Any], text: str, tmp_path: Path
) -> None:
    found = advice(study(tmp_path, tasks, splits, training={"max_length": 16}), tmp_path)
    assert sum(text in one for one in found) == 1, found


def facts(*labels: str, kind: str = "single_label", is_inferred: bool = False) -> TaskFacts:
    """Return the facts of a task with two rows of each class."""
    counts = {"train": dict.fromkeys(labels, 2)}
    return TaskFacts("tone", kind, labels, is_inferred, {"train": 9}, {"train": 9}, {}, counts)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("Ice cream", "ice-cream", True),
        ("ice cream", "ice_cream", True),
        ("caf\u00e9", "cafe\u0301", True),
        ("late", "la\u200bte", True),
        ("late", "\uff4cate", True),
        ("1", "1.0", True),
        ("A", "A-", False),
        ("1-2", "12", False),
        ("-1", "1", False),
        ("5.1", "5.10", False),
        ("late", "later", False),
    ],
)
def test_similar_classes_are_reported(one: str, other: str, alike: bool) -> None:
    found = [*_similar_classes(facts(one, other))]
    assert ["are different classes, but" in text for text in found] == [True] * alike


@pytest.mark.parametrize("label", ["None", "NaN", "nan", "NULL", "N/A", "<NA>"])
def test_inferred_classes_for_missing_values_are_reported(label: str) -> None:
    (found,) = _inferred_classes(facts(label, "none", is_inferred=True))
    assert found.startswith(f"`tone`: `{label}` is a class: if it means that nobody labelled the row")
    assert not [*_inferred_classes(facts(label, "none"))]


def test_joined_classes_are_reported() -> None:
    labels = ("late", "dear", "late, dear", "rude; loud", "red, white")
    (text,) = _inferred_classes(facts(*labels, kind="multi_label", is_inferred=True))
    assert text.startswith("`tone`: `late, dear` is one class. If it names several, give a list, or separ")


@pytest.mark.parametrize("place", ["tasks.json", "data.tasks", "data.sources"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_declared_classes_are_not_inferred(place: str, is_declared: bool, tmp_path: Path) -> None:
    tasks = TONE if is_declared else {"tone": {"kind": "single_label"}}
    study(tmp_path, tasks if place == "tasks.json" else {"tone": {"kind": "single_label"}})
    data: dict[str, Any] = {"source": "jsonl", "path": str(tmp_path / "set")}
    if place == "data.tasks":
        data["tasks"] = tasks
    elif place == "data.sources":
        data = {"sources": [{**data, "name": "one", "tasks": tasks, "rename": {"tone": "mood"}}]}
    config = StudyConfig.model_validate({"name": "s", "data": data})
    assert [task.is_inferred for task in load_data(config.data).tasks] == [not is_declared]


def test_odd_spans_are_reported(tmp_path: Path) -> None:
    tasks = {"who": {"kind": "token_classification", "span_names": ["name"]}}
    splits = {
        split: [
            {"id": f"r{n}", "text": f"so Ann met {n}", "spans": {"name": [[3, 5]]}}
            for n in range(at, at + 20)
        ]
        for split, at in {"train": 0, "validation": 1000}.items()
    }
    (found,) = advice(study(tmp_path, tasks, splits), tmp_path)
    assert found.startswith("`who`: 40 of 40 spans (100.0 %) begin or end inside a word or at a space")


def test_lost_spans_are_reported_with_the_remedy(tmp_path: Path) -> None:
    tasks = {"who": {"kind": "token_classification", "span_names": ["end"]}}
    splits = {
        "train": [{**row, "labels": {}, "spans": {"end": [[200, len(row["text"])]]}} for row in LONG],
        "validation": [{**row, "spans": {}} for row in rows(120, 1000)],
    }
    config = study(tmp_path, tasks, splits, training={"max_length": 16})
    (lost,) = [one for one in advice(config, tmp_path) if "lost" in one]
    assert lost.startswith("120 of 120 spans (100.0 %) of `who` are lost at `max_length` 16: set `data.long")
    assert "(the longest text has 45 tokens)" in lost
    windowed = study(tmp_path, tasks, splits, training={"max_length": 16}, data={"long_text": "window"})
    assert not [one for one in advice(windowed, tmp_path) if "lost" in one or "cut" in one]


def test_many_empty_cells_of_csv_are_reported() -> None:
    task = replace(facts("late", kind="multi_label"), num_empty={"train": 9})
    assert [one.endswith("set `data.csv.empty: unlabelled`.") for one in _unlabelled(task, is_csv=True)] == [
        True
    ]
    assert not [*_unlabelled(task, is_csv=False)]
