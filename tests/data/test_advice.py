"""Advice follows from the facts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import write_set
from support.tiny_tokenizers import tiny_tokenizer

from hpo.config.study_config import StudyConfig
from hpo.data.advice import data_advice
from hpo.data.checks import data_facts, length_facts
from hpo.data.dataset import load_data
from hpo.tasks.tokenized_split import Windowing

TONE: dict[str, Any] = {"tone": {"kind": "single_label", "classes": ["calm", "angry"]}}


def rows(num: int, first: int = 0, **labels: Any) -> list[dict[str, Any]]:
    """Rows of distinct texts with the same labels."""
    return [{"id": f"r{n}", "text": f"text {n}", "labels": labels} for n in range(first, first + num)]


def both(num: int, first: int = 0) -> list[dict[str, Any]]:
    """As many calm rows as angry ones, of one task."""
    return [*rows(num, first, tone="calm"), *rows(num, first + num, tone="angry")]


GOOD = {"train": both(60), "validation": both(60, 1000), "test": both(60, 2000)}


def study(folder: Path, tasks: Any = TONE, splits: Any = GOOD, **keys: Any) -> StudyConfig:
    """A study of a jsonl set."""
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
TAGS: dict[str, Any] = {"tags": {"kind": "multi_label", "classes": ["late", "dear"]}}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            {"validation": LEAKED},
            "2 of 120 texts (1.7 %) of validation are in train too (row `vr118` is `r118`)",
        ),
        (
            {"train": LONG},
            "120 of 360 texts (33.3 %) of the data are cut at `max_length` 16: set `data.long_text: window`",
        ),
        ({"test": OPEN}, "200 of 200 rows (100.0 %) of test are not labelled for `tone`"),
        (
            {"train": rows(60, tone="calm")},
            "`tone`: no row of train has `angry`: no model can learn it. Label rows of it in train.",
        ),
    ],
)
def test_a_fault_of_the_data_is_reported(bad: dict[str, Any], text: str, tmp_path: Path) -> None:
    found = advice(study(tmp_path, splits=GOOD | bad, training={"max_length": 16}), tmp_path)
    assert sum(text in one for one in found) == 1, found


THREE: dict[str, Any] = {"tone": {"kind": "single_label", "classes": ["calm", "angry", "glad"]}}
SIMILAR: dict[str, Any] = {"tone": {"kind": "single_label", "classes": ["calm", "angry", "Calm", "angry "]}}
NUMBER: dict[str, Any] = {"size": {"kind": "regression"}}


AT = {"train": 3000, "test": 4000}


def numbers(first: int, *values: float) -> list[dict[str, Any]]:
    return [row for n, value in enumerate(values) for row in rows(1, first + n, size=value)]


def all_four(first: int) -> list[dict[str, Any]]:
    return [
        row for n, one in enumerate(SIMILAR["tone"]["classes"]) for row in rows(9, first + 9 * n, tone=one)
    ]


@pytest.mark.parametrize(
    ("tasks", "splits", "texts"),
    [
        (THREE, GOOD, ["`tone`: no row has `glad`: is it spelt so in the data?"]),
        (
            THREE,
            GOOD | {"train": both(60) + rows(9, 500, tone="glad")},
            ["`tone`: only train has `glad`: the metrics of validation and test say nothing of it. Label"],
        ),
        (
            THREE,
            GOOD | {"test": both(60, 2000) + rows(9, 3000, tone="glad")},
            ["`tone`: only test has `glad`: no model can learn it. Move rows of it to train"],
        ),
        (
            THREE,
            GOOD | {split: GOOD[split] + rows(9, at, tone="glad") for split, at in AT.items()},
            ["`tone`: no row of validation has `glad`: the metrics there say nothing of it"],
        ),
        (
            SIMILAR,
            {"train": all_four(0), "validation": all_four(1000)},
            [
                "`tone`: `calm` and `Calm` are different classes, but differ only in case",
                "`tone`: `angry` and `angry ` are different classes",
            ],
        ),
        (
            NUMBER,
            {"train": numbers(0, 1, 2, 3), "validation": numbers(1000, 7, 7, 7)},
            ["`size`: all 3 numbers of validation are 7: r2 is 0 or 1 there"],
        ),
        (
            NUMBER,
            {"train": numbers(0, 5, 5, 5), "validation": numbers(1000, 7, 8)},
            ["`size`: all 3 numbers of train are 5: there is nothing to learn"],
        ),
        (
            TONE | NUMBER,
            {
                "train": [{**row, "labels": {"tone": "calm", "size": n}} for n, row in enumerate(rows(9))]
                + both(60, 100),
                "validation": numbers(1000, 1, 2) + both(3, 2000),
                "test": rows(1, 3000, tone="calm", size=1) + both(9, 4000),
            },
            ["test has no `score`, since it has 1 labelled row of `size`: label more."],
        ),
        (
            TONE,
            GOOD | {"test": [*rows(1, 3000, tone="calm"), *OPEN[:3]]},
            ["test has 1 labelled row of `tone`: its score can only be right or wrong. Label more."],
        ),
        (
            TONE,
            {"train": rows(1, 3000, tone="calm") + OPEN[:3], "validation": both(60)},
            ["train has 1 labelled row of `tone`: a model learns nothing from it. Label more."],
        ),
    ],
)
def test_metrics_without_meaning_are_reported(
    tasks: dict[str, Any], splits: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    found = advice(study(tmp_path, tasks=tasks, splits=splits), tmp_path)
    for text in texts:
        assert sum(text in one for one in found) == 1, found


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
def test_classes_that_are_probably_one(one: str, other: str, alike: bool, tmp_path: Path) -> None:
    tasks = {"tone": {"kind": "single_label", "classes": [one, other]}}
    splits = {
        split: rows(9, at, tone=one) + rows(9, at + 9, tone=other)
        for split, at in {"train": 0, "validation": 1000}.items()
    }
    found = advice(study(tmp_path, tasks=tasks, splits=splits), tmp_path)
    assert [bool(re.search("are different classes, but", text)) for text in found] == [True] * alike


def hints(config: StudyConfig, folder: Path) -> list[str]:
    """The advice about classes that were inferred from the rows."""
    return [one for one in advice(config, folder) if "nobody" in one or "separate" in one]


@pytest.mark.parametrize("label", ["None", "NaN", "nan", "NULL", "N/A", "<NA>"])
def test_classes_that_may_mean_no_label(label: str, tmp_path: Path) -> None:
    tasks = {"tone": {"kind": "single_label"}}
    splits = {
        split: rows(9, at, tone=label) + rows(9, at + 9, tone="none")
        for split, at in {"train": 0, "validation": 1000}.items()
    }
    (found,) = hints(study(tmp_path, tasks, splits), tmp_path)
    assert found.startswith(f"`tone`: `{label}` is a class: if it means that nobody labelled the row")


@pytest.mark.parametrize("place", ["tasks.json", "data.tasks", "data.sources"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_declared_classes_need_no_hint(place: str, is_declared: bool, tmp_path: Path) -> None:
    """The classes may be declared in any place where tasks are given, and a source may rename the task."""
    inferred: dict[str, Any] = {"tone": {"kind": "single_label"}, "tags": {"kind": "multi_label"}}
    labels = ("NA", ["late"]), ("yes", ["late, dear"])
    splits = {
        split: [
            row for n, (tone, tags) in enumerate(labels) for row in rows(9, at + 9 * n, tone=tone, tags=tags)
        ]
        for split, at in {"train": 0, "validation": 1000}.items()
    }
    classes = {"tone": ["NA", "yes"], "tags": ["late", "late, dear"]}
    declared = {name: {**task, "classes": classes[name]} for name, task in inferred.items()}
    tasks = declared if is_declared else inferred
    study(tmp_path, tasks if place == "tasks.json" else inferred, splits)
    data: dict[str, Any] = {"source": "jsonl", "path": str(tmp_path / "set")}
    if place == "data.tasks":
        data["tasks"] = tasks
    elif place == "data.sources":
        data = {"sources": [{**data, "name": "one", "tasks": tasks, "rename": {"tone": "mood"}}]}
    config = StudyConfig.model_validate({"name": "s", "data": data})
    assert len(hints(config, tmp_path)) == (0 if is_declared else 2)


def test_joined_classes_are_reported(tmp_path: Path) -> None:
    tags = ["late", "dear", "late, dear", "rude; loud", "red, white"]
    splits = {
        split: [row for n, tag in enumerate(tags) for row in rows(9, at + 9 * n, tags=[tag])]
        for split, at in {"train": 0, "validation": 1000}.items()
    }
    (text,) = hints(study(tmp_path, {"tags": {"kind": "multi_label"}}, splits), tmp_path)
    assert text.startswith("`tags`: `late, dear` is one class. If it names several, give a list, or separ")


@pytest.mark.parametrize(
    ("settings", "num"),
    [
        ({"training": {"batch_size": 120}}, None),
        ({"training": {"batch_size": 121}}, 121),
        ({"search_space": {"batch_size": {"type": "categorical", "choices": [8, 500]}}}, 500),
        ({"search_space": {"batch_size": {"type": "int", "low": 8, "high": 256, "log": True}}}, 256),
    ],
)
def test_a_batch_over_the_training_texts_is_reported(
    settings: dict[str, Any], num: int | None, tmp_path: Path
) -> None:
    found = advice(study(tmp_path, **settings), tmp_path)
    expected = f"`batch_size` {num} is more than the 120 texts of train: each step sees all of them."
    assert [one.startswith(expected) for one in found] == [True] * (num is not None)


def test_odd_spans_are_reported_with_an_excerpt(tmp_path: Path) -> None:
    tasks = {"who": {"kind": "token_classification", "span_names": ["name"]}}
    splits = {
        split: [
            {"id": f"r{n}", "text": f"so Ann met {n}", "spans": {"name": [[3, 5]]}}
            for n in range(at, at + 20)
        ]
        for split, at in {"train": 0, "validation": 1000}.items()
    }
    (found,) = advice(study(tmp_path, tasks, splits), tmp_path)
    assert found == (
        "`who`: 40 of 40 spans (100.0 %) begin or end inside a word or at a space, as in `so [An]n met 0` "
        "(row `r0`). Probably the end is the last character of the span: add 1 to each end."
    )


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


def test_many_empty_cells_of_csv_are_reported(tmp_path: Path) -> None:
    cells = [*["late"] * 5, *["dear"] * 5, *[""] * 300]
    for split, first in (("train", 0), ("validation", 1000)):
        lines = [f"text {first + n},{cell}\n" for n, cell in enumerate(cells)]
        (tmp_path / f"{split}.csv").write_text("text,tags\n" + "".join(lines))
    data = {"source": "csv", "path": str(tmp_path), "tasks": TAGS, "columns": {"labels": {"tags": "tags"}}}
    config = StudyConfig.model_validate({"name": "s", "data": data})
    assert any(one.endswith("set `data.csv.empty: unlabelled`.") for one in advice(config, tmp_path))
