"""csv, parquet and hub give the same examples as jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.jsonl_sets import load, load_set, write_set

from hpo.config.data_config import DataConfig
from hpo.data.dataset import DataSet
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
def test_every_source_gives_equal_examples(
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


def test_row_numbers_are_the_default_ids(tmp_path: Path) -> None:
    tasks = {"grade": {"kind": "regression"}}
    dataset = one_csv(tmp_path, "text,grade", "one,1", "two,2e0", tasks=tasks, labels={"grade": "grade"})
    assert [example.id for example in dataset.splits["train"]] == ["train-1", "train-2"]
    assert [example.id for example in dataset.splits["validation"]] == ["validation-1", "validation-2"]
    assert [example.labels["grade"] for example in dataset.splits["train"]] == [1.0, 2.0]


def test_an_empty_cell_of_spans_is_not_annotated(tmp_path: Path) -> None:
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


def test_missing_paths_are_found_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_DATA_DIR", str(tmp_path))
    config = DataConfig.model_validate({"source": "jsonl", "path": "/nowhere/a/sets/one"})
    assert located(config).path == Path("/nowhere/a/sets/one")
    for found in ("one", "sets/one", "a/sets/one", "nowhere/a/sets/one"):
        (tmp_path / found).mkdir(parents=True)
        assert located(config).path == tmp_path / found
    here = tmp_path / "sets" / "one"
    assert located(config.model_copy(update={"path": here})).path == here
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
