"""Rows, paths and encodings of csv and jsonl files."""

import bz2
import csv
import gzip
import io
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.jsonl_sets import load_set, write_set

from hpo.config.data_config import DataConfig
from hpo.data.dataset import DataSet
from hpo.data.sources import located
from hpo.errors import DataError


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
    columns = {"names": "person", "places": "place"}
    tasks = {task: {"kind": "token_classification", "span_names": [name]} for task, name in columns.items()}
    cells = ('"[[0, 3]]","[[7, 11]]"', '"[[0, 3]]",', ",[]")
    rows = (f"Ann in Rome,{spans}" for spans in cells)
    dataset = one_csv(tmp_path, "text,person,place", *rows, tasks=tasks, spans=columns)
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
    tasks = {"tone": {"kind": "single_label", "classes": ["calm", "angry"]}}
    tasks["names"] = {"kind": "token_classification", "span_names": ["person", "place"]}
    rows = [full, {**nulls, "alt_spans": {"person": None}, "segments": {"q": None}}, absent, calm]
    write_set(tmp_path, tasks, train=rows, validation=[{**row, "id": f"v{row['id']}"} for row in rows])
    _, of_nulls, of_absent, _ = load_set(tmp_path).splits["train"]
    for name in ("labels", "spans", "alt_spans", "segments", "annotated"):
        assert getattr(of_nulls, name) == getattr(of_absent, name), name
    with pytest.raises(DataError, match=r"`segments` must have `q`"):
        load_set(tmp_path, pair_segments=["q", "r"])


SPLITS = ("train", "validation")
TASKS: dict[str, Any] = {
    "tone": {"kind": "single_label", "classes": ["freundlich", "ärgerlich"]},
    "tags": {"kind": "multi_label", "classes": ["spät", "teuer", "defekt"]},
    "grade": {"kind": "regression"},
}
COLUMNS: dict[str, Any] = {"text": "Text", "labels": {"tone": "Ton", "tags": "Schlagwörter", "grade": "Note"}}
ROWS = [
    ["Text", "Ton", "Schlagwörter", "Note"],
    ["Schön, aber spät; Gerät für 5 €", "freundlich", "spät|teuer", "2,5"],
    ['Größer als "groß"\nund kaputt', "ärgerlich", '["defekt"]', "-1"],
    ["Alles gut", "freundlich", "", ""],
    ["Ohne Ton", "", "teuer", "3"],
]
EXPECTED = [
    {"tone": "freundlich", "tags": ["spät", "teuer"], "grade": 2.5},
    {"tone": "ärgerlich", "tags": ["defekt"], "grade": -1.0},
    {"tone": "freundlich", "tags": []},
    {"tags": ["teuer"], "grade": 3.0},
]


def excel(rows: list[list[str]], delimiter: str = ";", separator: str = "|") -> str:
    """Write rows like Excel: CRLF, and quotes where they are needed."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerows([cell.replace("|", separator) for cell in row] for row in rows)
    return file.getvalue()


@pytest.mark.parametrize(
    ("encoding", "delimiter", "form", "said"),
    [
        ("utf-8-sig", ";", {}, "read with `;`"),
        ("cp1252", ";", {"encoding": "cp1252", "list_separator": ","}, "read with `;`"),
        ("utf-16", "\t", {"encoding": "utf-16", "delimiter": "tab"}, ""),
        ("utf-16-le", ";", {"encoding": "utf-16-le", "delimiter": ";"}, ""),
        ("utf-8", ";", {"encoding": "latin-1"}, "read with `;`"),  # the bytes are UTF-8
        ("utf-8", ";", {"delimiter": ","}, "read with `;`, not as `data.csv` says"),
    ],
)
def test_files_of_a_german_excel(
    encoding: str, delimiter: str, form: dict[str, str], said: str, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    content = excel(ROWS, delimiter, form.get("list_separator", "|")).encode(encoding)
    for split in SPLITS:
        (tmp_path / f"{split}.csv").write_bytes(content)
    dataset = load_set(tmp_path, "csv", tasks=TASKS, columns=COLUMNS, csv=form)
    for split in SPLITS:
        assert [example.labels for example in dataset.splits[split]] == EXPECTED
        assert [example.text for example in dataset.splits[split]] == [row[0] for row in ROWS[1:]]
    told = [message for message in caplog.messages if "read with" in message]
    assert told == ([f"{tmp_path / split}.csv: {said}" for split in SPLITS] if said else [])


TOPIC = {"topic": {"kind": "single_label"}}
HEADLESS = [("1", "0", {}), ("title", "kind", {"names": ["kind", "title"]}), (1, 0, {})]


@pytest.mark.parametrize(("text", "label", "names"), HEADLESS)
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_without_a_header(text: Any, label: Any, names: Any, delimiter: str, tmp_path: Path) -> None:
    for split in SPLITS:
        with (tmp_path / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(
                [["good", "a, b; c"], ["bad", "one"], ["bad", 'd "e"|f']]
            )
    columns = {"text": text, "labels": {"topic": label}}
    dataset = load_set(tmp_path, "csv", tasks=TOPIC, columns=columns, csv={"header": False, **names})
    rows = dataset.splits["train"]
    assert [(row.text, row.labels["topic"]) for row in rows] == [
        ("a, b; c", "good"),
        ("one", "bad"),
        ('d "e"|f', "bad"),
    ]


def test_a_missing_header_is_named(tmp_path: Path) -> None:
    for split in SPLITS:
        (tmp_path / f"{split}.csv").write_text("good,I like it\nbad,no\n")
    columns = {"text": "text", "labels": {"topic": "label"}}
    with pytest.raises(DataError, match=r"has no column `text`.*set `data\.csv\.header: false`"):
        load_set(tmp_path, "csv", tasks=TOPIC, columns=columns)
    with pytest.raises(DataError, match=r"has no column `2` .*Known: 0, 1"):
        load_set(
            tmp_path, "csv", tasks=TOPIC, columns={"text": 2, "labels": {"topic": 0}}, csv={"header": False}
        )
    with pytest.raises(ValueError, match="is read with `header: false`"):
        load_set(tmp_path, "csv", tasks=TOPIC, columns=columns, csv={"names": ["label", "text"]})


PACKERS: dict[str, Any] = {
    ".gz": gzip.compress,
    ".zst": lambda raw: pa.Codec("zstd").compress(raw, asbytes=True),
    ".bz2": bz2.compress,
}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("has_suffix", [True, False])
def test_compressed_files_are_read(suffix: str, has_suffix: bool, tmp_path: Path) -> None:
    rows = [{"id": str(n), "text": f"text {n}", "labels": {"topic": "ab"[n % 2]}} for n in range(40)]
    made = {
        "jsonl": "".join(f"{json.dumps(row)}\n" for row in rows),
        "csv": "id,text,topic\n" + "".join(f"{n},text {n},{'ab'[n % 2]}\n" for n in range(40)),
    }
    for source, text in made.items():
        columns = {} if source == "jsonl" else {"columns": {"id": "id", "labels": {"topic": "topic"}}}
        path = tmp_path / f"train.{source}"
        path.write_text(text)
        plain = load_set(tmp_path, source, tasks=TOPIC, **columns)
        path.unlink()
        packed = path.with_name(path.name + suffix * has_suffix)
        packed.write_bytes(PACKERS[suffix](text.encode()))
        assert load_set(tmp_path, source, tasks=TOPIC, **columns).fingerprint == plain.fingerprint
        packed.write_bytes(packed.read_bytes()[:-9])
        with pytest.raises(DataError, match="must be a whole"):
            load_set(tmp_path, source, tasks=TOPIC, files={"train": str(packed)}, **columns)
        packed.unlink()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"PK\x03\x04", "zip"),
        (b"PAR1\x15", "parquet"),
        (b"\xfd7zXZ\0", "xz"),
        ("text".encode("utf-16"), "UTF-16"),
    ],
)
@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_other_formats_are_named(content: bytes, name: str, source: str, tmp_path: Path) -> None:
    (tmp_path / f"train.{source}").write_bytes(content)
    with pytest.raises(DataError, match=name):
        load_set(tmp_path, source, tasks=TOPIC)
