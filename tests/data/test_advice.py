"""Advice follows from the facts, and names the key of the study file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonl_sets import write_set
from tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.config.study_config import StudyConfig
from hpo.data.advice import MAX_ROWS, Advice, brief_advice, data_advice
from hpo.data.checks import data_facts
from hpo.data.dataset import DataSet, load_data
from hpo.data.lengths import length_facts
from hpo.data.tokenized_split import Windowing

TONE: dict[str, Any] = {"tone": {"kind": "single_label", "classes": ["calm", "angry"]}}


def rows(num: int, first: int = 0, **labels: Any) -> list[dict[str, Any]]:
    """Rows of distinct texts with the same labels."""
    return [{"id": f"r{n}", "text": f"text {n}", "labels": labels} for n in range(first, first + num)]


def both(num: int, first: int = 0) -> list[dict[str, Any]]:
    """As many calm rows as angry ones, of one task."""
    return [*rows(num, first, tone="calm"), *rows(num, first + num, tone="angry")]


def study(folder: Path, tasks: Any = TONE, splits: Any = None, **keys: Any) -> StudyConfig:
    """A study of a jsonl set; of two good splits where none are given."""
    given = splits or {"train": both(60), "validation": both(60, 1000), "test": both(60, 2000)}
    write_set(folder / "set", tasks, **given)
    data = {"source": "jsonl", "path": str(folder / "set"), **keys.pop("data", {})}
    return StudyConfig.model_validate({"name": "s", "data": data, **keys})


def advice(config: StudyConfig, folder: Path) -> list[Advice]:
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
SAME = [{**row, "text": "the same"} for row in both(60)]
TAGS: dict[str, Any] = {"tags": {"kind": "multi_label", "classes": ["late", "dear"]}}


@pytest.mark.parametrize(
    ("change", "key", "text", "is_grave"),
    [
        (
            {"splits": {"train": both(60), "validation": LEAKED, "test": both(60, 2000)}},
            "data.path",
            "2 of 120 texts (1.7 %) of validation stand in train too (row `vr118` is `r118`)",
            True,
        ),
        (
            {"splits": {"train": SAME, "validation": both(60, 1000), "test": both(60, 2000)}},
            "data.path",
            "119 of 120 texts (99.2 %) of train repeat an earlier one and count again in the loss",
            False,
        ),
        (
            {"splits": {"train": SAME, "validation": both(60, 1000), "test": both(60, 2000)}},
            "data.path",
            "120 rows of train have a text that another row has with another `tone`",
            True,
        ),
        (
            {"splits": {"train": LONG, "validation": both(60, 1000), "test": both(60, 2000)}},
            "training.max_length",
            "120 of 360 texts (33.3 %) are cut at `max_length` 16: set `data.long_text: window`",
            True,
        ),
        (
            {"splits": {"train": [*both(60), *OPEN], "validation": both(60, 1000), "test": both(60, 2000)}},
            "data.tasks",
            "200 of 320 rows (62.5 %) of train are not labelled for `tone`",
            False,
        ),
        (
            {"splits": {"train": both(60), "validation": both(60, 1000), "test": OPEN}},
            "data.tasks",
            "No row of test is labelled for `tone`, which has no score there",
            True,
        ),
        (
            {
                "splits": {
                    "train": rows(60, tone="calm"),
                    "validation": both(60, 1000),
                    "test": both(60, 2000),
                }
            },
            "data.tasks.tone.classes",
            "`tone`: class `angry` is evaluated, but in no training row",
            True,
        ),
        (
            {"tasks": {"tone": {"kind": "single_label", "classes": ["calm", "angry", "shy", "sad"]}}},
            "data.tasks.tone.classes",
            "`tone`: 2 classes (`shy`, `sad`) are in no row",
            False,
        ),
        (
            {"splits": {"train": both(60), "validation": rows(120, 1000, tone="calm")}},
            "data.path",
            "`tone`: class `angry` is in training rows alone",
            False,
        ),
        (
            {
                "splits": {
                    "train": both(60),
                    "validation": [*rows(120, 1000, tone="calm"), *rows(4, 1500, tone="angry")],
                }
            },
            "data.path",
            "`tone`: class `angry` has fewer than 5 in validation",
            False,
        ),
        (
            {"splits": {"train": [*both(60), *rows(600, 500, tone="calm")], "validation": both(60, 9000)}},
            "training.class_weighting",
            "`tone` has 660 training rows of `calm` and 60 of `angry`",
            False,
        ),
        (
            {"splits": {"train": both(60), "validation": both(9, 1000)}},
            "data.path",
            "has 18",
            False,
        ),
        (
            {"splits": {"train": both(60), "validation": both(60, 1000)}},
            "data.test_fraction",
            "no test",
            False,
        ),
        (
            {
                "tasks": TAGS,
                "splits": {
                    "train": [*rows(60, tags=["late"]), *rows(60, 60, tags=["dear"])],
                    "validation": [*rows(60, 200, tags=["late"]), *rows(60, 260, tags=["dear"])],
                },
            },
            "data.tasks.tags.kind",
            "Every row has exactly one class of `tags`",
            False,
        ),
        (
            {
                "tasks": TAGS,
                "splits": {
                    "train": [
                        *rows(500, tags=[]),
                        *rows(9, 600, tags=["late"]),
                        *rows(9, 700, tags=["dear"]),
                    ],
                    "validation": [*rows(60, 1200, tags=["late"]), *rows(60, 1260, tags=["dear"])],
                },
            },
            "data.tasks",
            "500 of 518 rows (96.5 %) of train have no class of `tags`",
            False,
        ),
        (
            {
                "tasks": {"grade": {"kind": "regression"}},
                "splits": {"train": rows(60, grade=2), "validation": rows(120, 60, grade=3)},
            },
            "data.tasks",
            "Every training target of `grade` is 2",
            True,
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_key(
    change: dict[str, Any], key: str, text: str, is_grave: bool, tmp_path: Path
) -> None:
    found = advice(study(tmp_path, training={"max_length": 16}, **change), tmp_path)
    matching = [one for one in found if text in one.text]
    assert [(one.key, one.is_grave) for one in matching] == [(key, is_grave)], [one.text for one in found]
    assert [one.is_grave for one in found] == sorted((one.is_grave for one in found), reverse=True)


def test_lost_spans_are_said_with_what_keeps_them(tmp_path: Path) -> None:
    tasks = {"who": {"kind": "token_classification", "span_names": ["end"]}}
    splits = {
        "train": [{**row, "labels": {}, "spans": {"end": [[200, len(row["text"])]]}} for row in LONG],
        "validation": [{**row, "spans": {}} for row in rows(120, 1000)],
    }
    config = study(tmp_path, tasks, splits, training={"max_length": 16})
    (lost,) = [one for one in advice(config, tmp_path) if "lost" in one.text]
    assert lost.key == "data.long_text"
    assert lost.text.startswith(
        "120 of 120 spans (100.0 %) of `who` are lost at `max_length` 16: set `data.long"
    )
    assert "(the longest text has 45 tokens)" in lost.text
    windowed = study(tmp_path, tasks, splits, training={"max_length": 16}, data={"long_text": "window"})
    assert not [one for one in advice(windowed, tmp_path) if "lost" in one.text or "cut" in one.text]


def test_an_empty_cell_of_csv_that_says_none_where_nobody_labelled(tmp_path: Path) -> None:
    cells = [*["late"] * 5, *["dear"] * 5, *[""] * 300]
    for split, first in (("train", 0), ("validation", 1000)):
        lines = [f"text {first + n},{cell}\n" for n, cell in enumerate(cells)]
        (tmp_path / f"{split}.csv").write_text("text,tags\n" + "".join(lines))
    data = {"source": "csv", "path": str(tmp_path), "tasks": TAGS, "columns": {"labels": {"tags": "tags"}}}
    config = StudyConfig.model_validate({"name": "s", "data": data})
    (found,) = [one for one in advice(config, tmp_path) if one.key == "data.csv.empty"]
    assert found.is_grave
    assert found.text.endswith("set `data.csv.empty: unlabelled`.")


def test_hpo_run_says_the_gravest_alone_and_tokenises_nothing(tmp_path: Path) -> None:
    splits = {"train": LONG, "validation": [{**row, "id": f"v{row['id']}"} for row in LONG]}
    config = study(tmp_path, splits=splits, training={"max_length": 16})
    dataset = load_data(config.data)
    examples = dataset.splits["train"]
    tokens = tokenize_split(examples, dataset.tasks, tiny_tokenizer("wordpiece"), Windowing(16))
    cut, leak = brief_advice(dataset, [("train", tokens)], config)
    assert cut == (
        "120 of 120 texts (100.0 %) of train are cut at `max_length` 16: raise it, or set `data.long_text: "
        "window`."
    )
    assert leak.startswith("120 of 120 texts (100.0 %) of validation stand in train too")
    good = study(tmp_path)
    assert brief_advice(load_data(good.data), [], good) == []


def test_hpo_run_does_not_look_at_many_rows_or_generated_ones(tmp_path: Path) -> None:
    class Unread(list[Any]):
        def __len__(self) -> int:
            return MAX_ROWS + 1

        def __iter__(self) -> Any:
            raise AssertionError("a row was read")

    config = study(tmp_path)
    dataset: DataSet = replace(load_data(config.data), splits={"train": Unread()})
    assert brief_advice(dataset, [], config) == []
    generated = StudyConfig.model_validate({"name": "s", "data": {"source": "synthetic"}})
    assert brief_advice(load_data(generated.data), [], generated) == []


@pytest.mark.parametrize(
    ("data", "validation", "test"),
    [
        ({"source": "synthetic"}, "data.synthetic.num_validation", "data.synthetic.num_test"),
        (
            {"source": "hub", "hub": {"name": "a/b"}, "tasks": TONE},
            "data.hub.splits.validation",
            "data.hub.splits.test",
        ),
        (
            {"source": "jsonl", "path": "/x", "files": {"test": "/x/t.jsonl"}},
            "data.validation_fraction",
            "data.files.test",
        ),
    ],
)
def test_the_key_of_a_split_is_where_its_rows_come_from(
    data: dict[str, Any], validation: str, test: str, tmp_path: Path
) -> None:
    few = {"train": both(60), "validation": both(9, 1000), "test": both(9, 2000)}
    facts = data_facts(load_data(study(tmp_path, splits=few).data))
    found = data_advice(facts, None, StudyConfig.model_validate({"name": "s", "data": data}))
    assert [one.key for one in found if "chance" in one.text] == [validation, test]
