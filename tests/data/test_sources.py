"""csv, parquet and hub give the same examples as jsonl."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from support.jsonl_sets import load, load_set, write_set

from hpo.config.data_config import DataConfig
from hpo.data.dataset import DataSet, load_data
from hpo.data.sources import located
from hpo.errors import DataError

TASKS = {
    "tone": {"kind": "single_label", "classes": ["calm", "angry"]},
    "topics": {"kind": "multi_label", "classes": ["work", "home|garden"]},
    "grade": {"kind": "regression"},
    "names": {"kind": "token_classification", "span_names": ["person", "place"]},
    "answer": {"kind": "span_extraction", "span_names": ["reply"]},
    "proof": {"kind": "span_per_label", "span_names": ["work", "home|garden"], "evidence_for": "topics"},
}
LINES: list[dict[str, Any]] = [
    {
        "id": "a",
        "text": 'Ann works\nin Rome, "she" says',
        "labels": {"tone": "calm", "topics": ["work"], "grade": 1.5},
        "spans": {"person": [[0, 3]], "place": [[13, 17]], "reply": [[4, 9]], "work": [[0, 9]]},
    },
    {"id": "b", "text": "nothing", "labels": {"tone": "angry", "topics": [], "grade": -2.0}, "spans": {}},
    {"id": "c", "text": "not annotated", "labels": {}},
]
COLUMNS = {
    "id": "key",
    "text": "body",
    "labels": {"tone": "tone", "topics": "topics", "grade": "grade"},
    "spans": {"names": "names", "answer": "reply", "proof": "proof"},
}


def cells(line: dict[str, Any]) -> dict[str, Any]:
    """A line as a table's row, with lists where a table can hold them."""
    labels, spans = line["labels"], line.get("spans")
    row = {"key": line["id"], "body": line["text"], **{task: labels.get(task) for task in COLUMNS["labels"]}}
    row["reply"] = None if spans is None else spans.get("reply", [])
    for column, names in (("names", ("person", "place")), ("proof", ("work",))):
        row[column] = None if spans is None else json.dumps({n: spans[n] for n in names if n in spans})
    return row


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Empty cells where there is nothing, JSON for lists."""

    def cell(value: Any) -> Any:
        return json.dumps(value) if isinstance(value, list | dict) else value

    texts = [{key: cell(value) for key, value in row.items()} for row in rows]
    pd.DataFrame(texts).to_csv(path, index=False)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("source", ["csv", "parquet", "hub"])
def test_every_source_gives_the_same_examples(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write, suffix = (write_csv, "csv") if source == "csv" else (write_parquet, "parquet")
    folder = tmp_path / "set"
    folder.mkdir()
    splits = {"train": LINES, "validation": [{**line, "id": f"{line['id']}v"} for line in LINES]}
    for split, lines in splits.items():
        write(folder / f"{split}.{suffix}", [cells(line) for line in lines])
    at: dict[str, Any] = {"hub": {"name": str(folder)}} if source == "hub" else {"path": str(folder)}
    if source == "csv":
        at["csv"] = {"empty": "unlabelled"}
    dataset = load(source=source, tasks=TASKS, columns=COLUMNS, **at)
    reference = load_set(write_set(tmp_path / "reference", TASKS, **splits))
    assert dataset.tasks == reference.tasks
    assert dataset.splits == reference.splits
    assert dataset.fingerprint == reference.fingerprint


def one_csv(folder: Path, header: str, *rows: str, tasks: dict[str, Any], **columns: Any) -> DataSet:
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_text("\n".join([header, *rows]) + "\n")
    return load_set(folder, "csv", tasks=tasks, columns=columns)


def test_pairs_come_in_jsonl_alone() -> None:
    pair = {"pair_segments": ["who", "rest"], "tasks": TASKS, "path": "x"}
    with pytest.raises(ValidationError, match="is read with source jsonl, but the source is csv"):
        load(source="csv", **pair)


def test_several_classes_may_be_joined_by_bars(tmp_path: Path) -> None:
    lines, tasks = ("one,a|b", "two,[]", "three,", "four, c"), {"topics": {"kind": "multi_label"}}
    dataset = one_csv(tmp_path, "text,topics", *lines, tasks=tasks, labels={"topics": "topics"})
    topics = [example.labels.get("topics") for example in dataset.splits["train"]]
    assert topics == [["a", "b"], [], [], ["c"]]
    assert dataset.tasks[0].labels == ("a", "b", "c")


def test_without_a_column_of_ids_the_row_numbers_are_the_ids(tmp_path: Path) -> None:
    tasks = {"grade": {"kind": "regression"}}
    dataset = one_csv(tmp_path, "text,grade", "one,1", "two,2e0", tasks=tasks, labels={"grade": "grade"})
    assert [example.id for example in dataset.splits["train"]] == ["train-1", "train-2"]
    assert [example.id for example in dataset.splits["validation"]] == ["validation-1", "validation-2"]
    assert [example.labels["grade"] for example in dataset.splits["train"]] == [1.0, 2.0]


def test_an_empty_cell_of_spans_leaves_its_task_open(tmp_path: Path) -> None:
    tasks = {
        "names": {"kind": "token_classification", "span_names": ["person"]},
        "places": {"kind": "token_classification", "span_names": ["place"]},
    }
    dataset = one_csv(
        tmp_path,
        "text,person,place",
        'Ann in Rome,"[[0, 3]]","[[7, 11]]"',
        'Ann in Rome,"[[0, 3]]",',
        "Ann in Rome,,[]",
        tasks=tasks,
        spans={"names": "person", "places": "place"},
    )
    annotated = [sorted(example.annotated) for example in dataset.splits["train"]]
    assert annotated == [["names", "places"], ["names"], ["places"]]
    assert dataset.splits["train"][0].spans == {"person": [(0, 3)], "place": [(7, 11)]}


def test_classes_stored_as_numbers_get_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    kinds = {"tone": "single_label", "stars": "single_label", "topics": "multi_label"}
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "tone": datasets.ClassLabel(names=["calm", "angry"]),
            "stars": datasets.Value("int32"),
            "topics": datasets.List(datasets.ClassLabel(names=["work", "home"])),
        }
    )
    rows = {
        "text": ["one", "two", "three"],
        "tone": [1, 0, -1],
        "stars": [5, 1, 5],
        "topics": [[1], [0, 1], []],
    }
    table = datasets.Dataset.from_dict(rows, features=features)
    (tmp_path / "set").mkdir()
    table.to_parquet(tmp_path / "set" / "train.parquet")
    table.to_parquet(tmp_path / "set" / "dev.parquet")
    config = {
        "source": "hub",
        "hub": {"name": "set", "splits": {"validation": "validation"}},  # a folder beside the study file
        "tasks": {name: {"kind": kind} for name, kind in kinds.items()},
        "columns": {"labels": {name: name for name in kinds}},
    }
    dataset = load_data(DataConfig.model_validate(config, context={"folder": tmp_path}))
    assert [example.labels for example in dataset.splits["validation"]] == [
        {"tone": "angry", "stars": "5", "topics": ["home"]},
        {"tone": "calm", "stars": "1", "topics": ["work", "home"]},
        {"stars": "5", "topics": []},
    ]


def test_the_longest_end_of_a_path_that_is_in_the_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPO_DATA_DIR", str(tmp_path))
    config = DataConfig.model_validate({"source": "jsonl", "path": "/nowhere/a/sets/one"})
    assert located(config).path == Path("/nowhere/a/sets/one")
    for found in ("one", "sets/one", "a/sets/one", "nowhere/a/sets/one"):
        (tmp_path / found).mkdir(parents=True)
        assert located(config).path == tmp_path / found
    here = tmp_path / "sets" / "one"
    assert located(config.model_copy(update={"path": here})).path == here, (
        "what is at its path is taken there"
    )
    files = {"train": "/nowhere/x/../train.jsonl"}
    (tmp_path / "train.jsonl").touch()
    given = {"source": "jsonl", "files": files, "tasks": "/nowhere/sets/tasks.json"}
    config = located(DataConfig.model_validate(given))
    assert config.files.train == tmp_path / "train.jsonl"
    assert config.tasks == Path("/nowhere/sets/tasks.json")
    hub = {"source": "hub", "hub": {"name": "/elsewhere/sets/one"}, "tasks": {"t": {"kind": "regression"}}}
    config = located(DataConfig.model_validate(hub))
    assert config.hub is not None
    assert config.hub.name == str(here)


WORDS = ["None", "NA", "nan", "null", "N/A", "n/a", "NULL", "-nan", "<NA>", "yes"]


@pytest.mark.parametrize("source", ["csv", "hub", "hub jsonl", "parquet"])
def test_no_word_is_read_as_an_empty_cell(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandas reads most of them as NaN, and `datasets` reads csv files by pandas."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"key": f"{word}{n}", "body": word, "tone": word} for n, word in enumerate(WORDS)]
    rows.append({"key": "x", "body": "text", "tone": None})
    for split in ("train", "validation"):
        named = [{**row, "key": f"{split} {row['key']}"} for row in rows]
        if source == "hub jsonl":
            (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in named))
        else:
            write, suffix = (write_parquet, "parquet") if source == "parquet" else (write_csv, "csv")
            write(folder / f"{split}.{suffix}", named)
    kind = source.partition(" ")[0]
    dataset = load(
        source=kind,
        tasks={"tone": {"kind": "single_label"}},
        columns={"id": "key", "text": "body", "labels": {"tone": "tone"}},
        **({"hub": {"name": str(folder)}} if kind == "hub" else {"path": str(folder)}),
    )
    assert dataset.tasks[0].labels == tuple(sorted(WORDS))
    for examples in dataset.splits.values():
        assert [example.labels.get("tone") for example in examples] == [*WORDS, None]
        assert [example.text for example in examples] == [*WORDS, "text"]


@pytest.mark.parametrize("source", ["jsonl", "csv", "parquet"])
def test_whole_numbers_are_names_of_classes(source: str, tmp_path: Path) -> None:
    """Also as floats, which pandas makes of a column of whole numbers with an empty cell."""
    kinds = {"stars": "single_label", "likes": "single_label", "tags": "multi_label"}
    labels = [
        {"stars": 2**53 + 1, "likes": 0.0, "tags": [1, 2]},
        {"stars": 5, "likes": 1.0, "tags": [2]},
        {"stars": 5, "tags": []},
    ]
    rows = [{"text": "word", **{name: of.get(name) for name in kinds}} for of in labels]
    for split in ("train", "validation"):
        if source == "jsonl":
            lines = [{"id": f"{split}{n}", "text": "word", "labels": of} for n, of in enumerate(labels)]
            write_set(tmp_path, TASKS, **{split: lines})
        elif source == "csv":
            lines = [f"word,{row['stars']},{row['likes'] or ''},{json.dumps(row['tags'])}" for row in rows]
            cells = [line.replace("[1, 2]", "1|2").replace("[2]", "2") for line in lines]
            (tmp_path / f"{split}.csv").write_text("\n".join(["text,stars,likes,tags", *cells]))
        else:
            write_parquet(tmp_path / f"{split}.parquet", rows)
    options = {} if source == "jsonl" else {"columns": {"labels": {name: name for name in kinds}}}
    if source == "csv":
        kinds.pop("likes")  # a csv file has the text of a number, 0.0, which stays as it is
        options = {"columns": {"labels": {name: name for name in kinds}}}
    tasks = {name: {"kind": kind} for name, kind in kinds.items()}
    dataset = load_set(tmp_path, source, tasks=tasks, **options)
    expected = [
        {"stars": "9007199254740993", "likes": "0", "tags": ["1", "2"]},
        {"stars": "5", "likes": "1", "tags": ["2"]},
        {"stars": "5", "tags": []},
    ]
    assert [example.labels for example in dataset.splits["train"]] == [
        {name: of[name] for name in kinds if name in of} for of in expected
    ]


@pytest.mark.parametrize("value", [1.5, {"a": 1}, ["b"], 1e300])
def test_classes_of_other_types_are_refused(value: Any, tmp_path: Path) -> None:
    row = {"id": "r", "text": "word", "labels": {"t": value}}
    write_set(tmp_path, TASKS, train=[row], validation=[{**row, "id": "v"}])
    text = re.escape(f"labels.t must be one class, as text or a whole number, but got {value}")
    with pytest.raises(DataError, match=text):
        load_set(tmp_path, tasks={"t": {"kind": "single_label", "classes": ["a", "b"]}})


def test_a_column_twice_is_refused(tmp_path: Path) -> None:
    tasks, labels = {"t": {"kind": "single_label"}}, {"t": "label"}
    with pytest.raises(DataError, match=r"train\.csv: must have the column `label` once, but has it 2 times"):
        one_csv(tmp_path, "text,label,label", "one,a,b", "two,b,a", tasks=tasks, labels=labels)
    one_csv(tmp_path, "text,label,x,x", "one,a,b,", "two,b,a,", tasks=tasks, labels=labels)


def test_null_keys_of_jsonl_are_absent_keys(tmp_path: Path) -> None:
    """`datasets`, pyarrow and polars write all keys in each row."""
    full = {"id": "a", "text": "Ann", "labels": {"tone": "calm"}, "spans": {"person": [[0, 3]]}}
    nulls = {"id": "b", "text": "Ann", "labels": {"tone": None}, "spans": {"person": None, "place": None}}
    absent = {"id": "c", "text": "Ann", "labels": {}, "spans": {}, "segments": None, "group": None}
    calm = {"id": "d", "text": "Ann", "labels": {"tone": "angry"}}
    tasks = {name: TASKS[name] for name in ("tone", "names")}
    rows = [full, {**nulls, "alt_spans": {"person": None}, "segments": {"q": None}}, absent, calm]
    write_set(tmp_path, tasks, train=rows, validation=[{**row, "id": f"v{row['id']}"} for row in rows])
    _, of_nulls, of_absent, _ = load_set(tmp_path).splits["train"]
    for name in ("labels", "spans", "alt_spans", "segments", "annotated"):
        assert getattr(of_nulls, name) == getattr(of_absent, name), name
    with pytest.raises(DataError, match=r"`segments` must have `q`"):
        load_set(tmp_path, pair_segments=["q", "r"])


def test_parquet_has_decimals_and_maps(tmp_path: Path) -> None:
    columns = {
        "text": pa.array(["Ann", "Rome"]),
        "price": pa.array([Decimal("1.25"), None], pa.decimal128(9, 2)),
        "names": pa.array([[("person", [[0, 3]])], []], pa.map_(pa.string(), pa.list_(pa.list_(pa.int64())))),
    }
    for split in ("train", "validation"):
        pq.write_table(pa.table(columns), tmp_path / f"{split}.parquet")
    tasks = {"price": {"kind": "regression"}, "names": TASKS["names"]}
    columns_of = {"labels": {"price": "price"}, "spans": {"names": "names"}}
    dataset = load_set(tmp_path, "parquet", tasks=tasks, columns=columns_of)
    assert [dict(example.labels) for example in dataset.splits["train"]] == [{"price": 1.25}, {}]
    assert [dict(example.spans) for example in dataset.splits["train"]] == [{"person": [(0, 3)]}, {}]
