"""csv, jsonl, parquet and the hub read a cell in the same way: the table of `hpo.data.tables`."""

from __future__ import annotations

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.jsonl_sets import load

from hpo.data.dataset import DataSet
from hpo.errors import DataError

READERS = ["jsonl", "csv", "parquet", "hub csv", "hub csv;", "hub csv features", "hub jsonl", "hub parquet"]
Columns = dict[str, list[Any]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def plain(cell: Any) -> Any:
    return float(cell) if isinstance(cell, Decimal) else cell


def text(cell: Any) -> str:
    """A cell as pandas writes it to csv."""
    if cell is None:
        return ""
    return json.dumps(cell) if isinstance(cell, list | dict) else str(cell)


def write(folder: Path, reader: str, split: str, columns: Columns) -> None:
    """Write the columns of labels beside `id`, `text` and, where there is one, `spans`."""
    size = len(next(iter(columns.values())))
    table: Columns = {"id": [f"{split}{n}" for n in range(size)], "text": ["Ann in Rome"] * size, **columns}
    rows = [dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)]
    suffix = next(one for one in ("csv", "parquet", "jsonl") if one in reader)
    path = folder / f"{split}.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter=";" if ";" in reader else ",")
            writer.writerows([list(table), *([text(cell) for cell in row.values()] for row in rows)])
    elif suffix == "parquet":
        pq.write_table(pa.table(table), path)
    else:
        rows = [{name: plain(cell) for name, cell in row.items()} for row in rows]
        if reader == "jsonl":
            rows = [
                {
                    "id": row.pop("id"),
                    "text": row.pop("text"),
                    "spans": {"person": row.pop("spans", None)},
                    "labels": row,
                }
                for row in rows
            ]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


FILES: dict[str, Any] = {
    "config_name": "default",
    "data_files": [{"split": split, "path": f"{split}.*"} for split in ("train", "validation")],
}


def write_card(folder: Path, content: dict[str, Any]) -> None:
    """Write the card of a data set of the hub."""
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(content)}---\n")


def read(folder: Path, reader: str, tasks: dict[str, Any], columns: Columns, **more: Any) -> DataSet:
    """The columns as training and validation data; `spans` are those of the task `names`."""
    folder = folder / reader.replace(" ", "_")
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        write(folder, reader, split, columns)
    if ";" in reader:
        write_card(folder, {"configs": [{**FILES, "sep": ";"}]})
    elif "features" in reader:
        features = [{"name": name, "dtype": "string"} for name in ("id", "text", *columns)]
        write_card(folder, {"dataset_info": {"features": features}})
    source = reader.partition(" ")[0]
    at: dict[str, Any] = {"hub": {"name": str(folder)}} if source == "hub" else {"path": str(folder)}
    if source != "jsonl":
        labels = {name: name for name in columns if name != "spans"}
        spans = {"names": "spans"} if "spans" in columns else {}
        at["columns"] = {"id": "id", "labels": labels, "spans": spans}
    return load(source=source, tasks=tasks, **at, **more)


WORDS = ["None", "NA", "nan", "null", "yes"]
ONE, MANY, NUMBER = "single_label", "multi_label", "regression"
CELLS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "words": (ONE, WORDS, WORDS),
    "blank": (ONE, ["yes", "", " \t", None, "no"], ["yes", None, None, None, "no"]),
    "spaces": (ONE, ["pos", "pos ", "\tpos", "\u00a0pos", "neg"], ["pos"] * 4 + ["neg"]),
    "accents": (ONE, ["caf\u00e9", "cafe\u0301", "t", "t", None], ["caf\u00e9", "caf\u00e9", "t", "t", None]),
    "integers": (ONE, [0, 1, None, 2**53 + 1, -3], ["0", "1", None, "9007199254740993", "-3"]),
    "booleans": (ONE, [True, False, None, True, True], ["True", "False", None, "True", "True"]),
    "codes": (ONE, ["007", "1e3", "1.50", "2024-01-01", "1_0"], ["007", "1e3", "1.50", "2024-01-01", "1_0"]),
    "lists": (MANY, [["a", "b"], [], ["a "], [" b"], []], [["a", "b"], [], ["a"], ["b"], []]),
    "joined": (MANY, ["a|b", '["a"]', "", "  ", " b "], [["a", "b"], ["a"], [], [], ["b"]]),
    "numbers": (NUMBER, [1.5, -2.0, None, 1e300 / 1e200, 0.0], [1.5, -2.0, None, 1e100, 0.0]),
    "whole": (NUMBER, [1, -2, None, 2**53, 0], [1.0, -2.0, None, 2.0**53, 0.0]),
    "decimals": (NUMBER, [Decimal("1.25"), None, Decimal("-3.00"), None, None], [1.25, None, -3, None, None]),
    "digits": (NUMBER, ["1.5", " 2 ", "1e3", "", None], [1.5, 2.0, 1000.0, None, None]),
}  # fmt: skip
TASKS = {name: {"kind": kind} for name, (kind, _, _) in CELLS.items()}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_reads_a_cell_in_the_same_way(reader: str, tmp_path: Path) -> None:
    dataset = read(tmp_path, reader, TASKS, {name: cells for name, (_, cells, _) in CELLS.items()})
    for name, (_, _, expected) in CELLS.items():
        for split in ("train", "validation"):
            assert [row.labels.get(name) for row in dataset.splits[split]] == expected, name
    labels = {task.name: set(task.labels) for task in dataset.tasks}
    assert labels["spaces"] == {"pos", "neg"}
    assert labels["accents"] == {"café", "t"}


@pytest.mark.parametrize("reader", READERS)
def test_whole_numbers_match_declared_classes(reader: str, tmp_path: Path) -> None:
    """pandas writes 1.0 to csv where a column of whole numbers has an empty cell; 5.10 is no number."""
    versions = ["5.1", "5.10", "05"]
    cells: Columns = {"floats": [1.0, None, 5.0], "integers": [1, None, 5], "texts": ["1.0", None, "5"]}
    declared = {f"{name}{n}": ["1", "5"] if n else ["1.0", "5.0"] for name in cells for n in (0, 1)}
    tasks = {name: {"kind": ONE, "classes": classes} for name, classes in declared.items()}
    tasks["versions"] = {"kind": ONE, "classes": versions}
    columns = {name: cells[name[:-1]] for name in declared}
    dataset = read(tmp_path, reader, tasks, {**columns, "versions": versions})
    rows = dataset.splits["train"]
    for name, (one, five) in declared.items():
        assert [row.labels.get(name) for row in rows] == [one, None, five], name
    assert [row.labels["versions"] for row in rows] == versions


@pytest.mark.parametrize("reader", [reader for reader in READERS if "csv" not in reader])
def test_null_is_unlabelled_and_an_empty_list_is_not(reader: str, tmp_path: Path) -> None:
    dataset = read(tmp_path, reader, {"tags": {"kind": MANY}}, {"tags": [["a"], None, []]})
    assert [row.labels.get("tags") for row in dataset.splits["train"]] == [["a"], None, []]


@pytest.mark.parametrize("reader", [reader for reader in READERS if "csv" in reader])
def test_empty_cells_of_csv_may_be_unlabelled(reader: str, tmp_path: Path) -> None:
    columns = {"tags": [["a"], None, []]}
    dataset = read(tmp_path, reader, {"tags": {"kind": MANY}}, columns, csv={"empty": "unlabelled"})
    assert [row.labels.get("tags") for row in dataset.splits["train"]] == [["a"], None, []]


REFUSED: dict[str, tuple[str, list[Any], str]] = {
    "infinite": (NUMBER, [1.0, float("inf")], " must be a finite number, but got inf. Leave it empty"),
    "words": (NUMBER, ["1", "one"], " must be a finite number, but got 'one'"),
    "no_number": (NUMBER, ["1", "NaN"], " must be a finite number, but got "),
    "unknown": (ONE, ["a", "c"], ": unknown class `c`"),
    "joined": (MANY, ["a", "a,b"], ": unknown class `a,b`"),
    "quotes": (MANY, ["a", "['a']"], " must be JSON in double quotes"),
    **{
        f"list{n}": (ONE, ["a", cell], " must be one class, as text or a whole number, but got ")
        for n, cell in enumerate(
            ['["a", "b"]', "['a']", "[ 'a' 'b']", "[1 2]", " [-1]\n", "[]", "[ ]", "[[]]", '[{"a": 1}]']
        )
    },
    "twice": (MANY, [["a"], ["a", "a"]], " names a class twice"),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_a_cell_with_the_same_words(reader: str, tmp_path: Path) -> None:
    for name, (kind, cells, message) in REFUSED.items():
        classes = {} if kind == NUMBER else {"classes": ["a", "b"]}
        with pytest.raises(DataError) as caught:
            read(tmp_path / name, reader, {"t": {"kind": kind, **classes}}, {"t": cells})
        first, second, third = str(caught.value).splitlines()
        assert first == "2 bad rows in the data; mend or remove:"
        assert f"labels.t{message}" in second
        assert f"labels.t{message}" in third


@pytest.mark.parametrize("reader", READERS)
def test_a_list_is_no_class_where_classes_are_inferred(reader: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, reader, {"t": {"kind": ONE}}, {"t": ['["a", "b"]', "[]", "c", "d"]})
    assert str(caught.value).startswith("4 bad rows in the data; mend or remove:\n")
    assert 'labels.t must be one class, as text or a whole number, but got \'["a", "b"]\'' in str(
        caught.value
    )


@pytest.mark.parametrize("reader", READERS)
def test_a_class_may_have_brackets(reader: str, tmp_path: Path) -> None:
    classes = ["[NAME]", "[unknown] a", "[1] see", "[0, 10)", "a[]"]
    dataset = read(tmp_path, reader, {"t": {"kind": ONE}}, {"t": classes})
    assert [row.labels["t"] for row in dataset.splits["train"]] == classes


@pytest.mark.parametrize(
    ("cell", "type_"),
    [
        (1.5, pa.float64()),
        (datetime.date(2024, 1, 1), pa.date32()),
        (b"a", pa.binary()),
        ({"a": 1}, pa.struct({"a": pa.int64()})),
    ],
    ids=str,
)
def test_parquet_classes_of_other_types_are_refused(cell: Any, type_: pa.DataType, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"labels\.t must be one class, as text or a whole number, but got "):
        read(tmp_path, "parquet", {"t": {"kind": ONE, "classes": ["a", "b"]}}, {"t": pa.array([cell], type_)})


@pytest.mark.parametrize("reader", ["jsonl", "parquet", "hub jsonl", "hub parquet"])
def test_classes_that_cannot_be_inferred_are_shown(reader: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, reader, {"t": {"kind": ONE}}, {"t": [1.5, 2.5]})
    first, second, _ = str(caught.value).splitlines()
    assert first == "2 bad rows in the data; mend or remove:"
    assert "labels.t must be one class, as text or a whole number, but got 1.5" in second


@pytest.mark.parametrize("reader", ["parquet", "hub parquet"])
@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a", None, "b"]).dictionary_encode(),
        pa.array(["a", None, "b"], pa.large_string()),
        pa.array(["a", None, "b"], pa.string_view()),
    ],
    ids=lambda array: str(array.type),
)
def test_every_arrow_type_of_text_is_read(reader: str, array: Any, tmp_path: Path) -> None:
    dataset = read(tmp_path, reader, {"t": {"kind": ONE}}, {"t": array})
    assert [row.labels.get("t") for row in dataset.splits["train"]] == ["a", None, "b"]


@pytest.mark.parametrize("reader", READERS)
def test_a_column_without_labels_is_refused(reader: str, tmp_path: Path) -> None:
    message = r"task `t` must have at least 2 classes, but its rows have `\[\]`. Label more rows"
    with pytest.raises(DataError, match=message):
        read(tmp_path, reader, {"t": {"kind": ONE}}, {"t": [None, None]})


@pytest.mark.parametrize("reader", ["csv", "parquet", "hub jsonl"])
def test_columns_that_differ_by_case_are_told_apart(
    reader: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = {"t": {"kind": ONE}}
    folder = tmp_path / reader.replace(" ", "_")
    folder.mkdir()
    for split in ("train", "validation"):
        write(folder, reader, split, {"t": ["a", "b"], "T": ["x", "y"]})
    source = reader.partition(" ")[0]
    at: dict[str, Any] = {"hub": {"name": str(folder)}} if source == "hub" else {"path": str(folder)}
    dataset = load(source=source, tasks=tasks, columns={"id": "id", "labels": {"t": "t"}}, **at)
    assert [row.labels["t"] for row in dataset.splits["train"]] == ["a", "b"]
    told = [message for message in caplog.messages if "the column `t` is read, but `T` is not" in message]
    assert len(told) == 2


# Spans

TONE = {"tone": {"kind": ONE}}
PERSON = {"names": {"kind": "token_classification", "span_names": ["person"]}}


@pytest.mark.parametrize("reader", READERS)
def test_spans_may_be_objects_of_start_and_end(reader: str, tmp_path: Path) -> None:
    cells = [[{"start": 0, "end": 3}], [], [{"start": 7, "end": 11}, {"start": 0, "end": 3}]]
    dataset = read(tmp_path, reader, PERSON, {"spans": cells})
    assert [row.spans.get("person", []) for row in dataset.splits["train"]] == [
        [(0, 3)],
        [],
        [(0, 3), (7, 11)],
    ]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "messages",
    [
        {
            (0, 12): "[0, 12] must lie inside the text of 11 characters",
            (3, 0): "0 <= start < end must hold, but got [3, 0]",
            (-1, 3): "0 <= start < end must hold, but got [-1, 3]",
            (0, 3, 5): "a span must be [start, end] in whole characters, but got [0, 3, 5]",
        },
        {(0.0, 3.0): "a span must be [start, end] in whole characters, but got [0.0, 3.0]"},
        {("0", "3"): "a span must be [start, end] in whole characters, but got ['0', '3']"},
    ],
    ids=["integers", "floats", "texts"],
)
def test_every_reader_refuses_a_span_with_the_same_words(
    reader: str, messages: dict[tuple[Any, ...], str], tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, reader, PERSON, {"spans": [[list(pair)] for pair in messages]})
    for message in messages.values():
        assert f"spans.person: {message}" in str(caught.value)


# Files


def test_a_key_twice_in_a_cell_is_refused(tmp_path: Path) -> None:
    cells = ['{"person": [[0, 3]], "person": [[7, 11]]}']
    with pytest.raises(DataError, match=r"column spans must be JSON.*the key `person` must occur once"):
        read(tmp_path, "csv", PERSON, {"spans": cells})


@pytest.mark.parametrize("reader", ["parquet", "hub parquet"])
def test_a_key_twice_in_a_map_of_parquet_is_refused(reader: str, tmp_path: Path) -> None:
    type_ = pa.map_(pa.string(), pa.list_(pa.list_(pa.int64())))
    spans = pa.array([[("person", [[0, 3]]), ("person", [[7, 11]])]], type_)
    with pytest.raises(DataError, match=r"train\.parquet: .*person"):
        read(tmp_path, reader, PERSON, {"spans": spans})


@pytest.mark.parametrize("reader", ["parquet", "hub parquet"])
def test_maps_of_parquet_are_spans_by_name(reader: str, tmp_path: Path) -> None:
    type_ = pa.map_(pa.string(), pa.list_(pa.list_(pa.int64())))
    spans = pa.array([[("person", [[0, 3]])], [], [("person", None)]], type_)
    dataset = read(tmp_path, reader, PERSON, {"spans": spans})
    assert [dict(row.spans) for row in dataset.splits["train"]] == [{"person": [(0, 3)]}, {}, {}]


def test_a_broken_file_of_the_hub_is_refused_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "set" / f"{split}.jsonl").write_text('{"text": "a", "text": "b"}\n')
    with pytest.raises(DataError, match=r"cannot load .*ArrowInvalid: JSON parse error: Column\(/text\) was"):
        load(
            source="hub",
            hub={"name": str(tmp_path / "set")},
            tasks=TONE,
            columns={"labels": {"tone": "tone"}},
        )


@pytest.mark.parametrize("header", ["id,text,tone,tone", "id,text,tone,tone ", "id,text, tone,tone"])
@pytest.mark.parametrize("source", ["csv", "hub"])
def test_a_column_twice_is_refused(source: str, header: str, tmp_path: Path) -> None:
    tmp_path = tmp_path / "set"
    tmp_path.mkdir()
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text(f"{header}\n{split}1,one,a,b\n{split}2,two,b,a\n")
    at: dict[str, Any] = {"hub": {"name": str(tmp_path)}} if source == "hub" else {"path": str(tmp_path)}
    with pytest.raises(DataError, match="must have the column `tone` once"):
        load(source=source, tasks=TONE, columns={"id": "id", "labels": {"tone": "tone"}}, **at)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", b"\x1f\x8b\x08\x00data", "is a gzip file, but must be text. Unpack it"),
        ("train.jsonl", b"\x1f\x8b\x08\x00data", "is a gzip file, but must be text. Unpack it"),
        ("train.csv", b"PK\x03\x04data", "is a zip or Excel file, but must be text."),
        ("train.csv", b"PAR1\x15data", "is a parquet file, but must be text."),
        ("train.jsonl", '{"text": "a"}'.encode("utf-16"), "is UTF-16, but must be UTF-8"),
        ("train.jsonl", b'[\n{"text": "a"}\n]', "is a JSON array, but must have one JSON object a line"),
    ],
)
def test_files_of_another_format_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    suffix = name.partition(".")[2]
    columns = {} if suffix == "jsonl" else {"columns": {"labels": {"tone": "tone"}}}
    with pytest.raises(DataError) as caught:
        load(source=suffix, path=str(tmp_path), tasks=TONE, **columns)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_csv_of_the_hub_is_read_as_any_csv(end: str, tmp_path: Path) -> None:
    """German Excel: semicolons, a byte order mark, a quoted line break and a blank line."""
    tmp_path = tmp_path / "set"
    tmp_path.mkdir()
    for split in ("train", "validation"):
        lines = ["id;text;tone", f'{split}1;"one\ntwo; three";None', "", f"{split}2;four;ja"]
        (tmp_path / f"{split}.csv").write_bytes(("\ufeff" + end.join(lines)).encode())
    columns = {"id": "id", "labels": {"tone": "tone"}}
    dataset = load(source="hub", hub={"name": str(tmp_path)}, tasks=TONE, columns=columns)
    assert [row.text for row in dataset.splits["train"]] == ["one\ntwo; three", "four"]
    assert [row.labels["tone"] for row in dataset.splits["train"]] == ["None", "ja"]


def test_columns_may_be_called_as_another_format_begins(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text("PAR1,tone,text\n1,a,one\n2,b,two\n")
    dataset = load(source="csv", path=str(tmp_path), tasks=TONE, columns={"labels": {"tone": "tone"}})
    assert [row.text for row in dataset.splits["train"]] == ["one", "two"]


# The card of a data set of the hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    return folder


def hub(folder: Path, **more: Any) -> DataSet:
    at = {"columns": {"id": "id", "labels": {"t": "t"}}, "tasks": {"t": {"kind": ONE}}}
    return load(source="hub", hub={"name": str(folder)}, **at, **more)


@pytest.mark.parametrize("reader", ["hub jsonl", "hub parquet"])
def test_settings_of_csv_are_refused_for_other_files(reader: str, folder: Path) -> None:
    tasks = {"t": {"kind": MANY}}
    with pytest.raises(DataError, match=r"data\.csv: .* csv files, but .* Leave `data\.csv` out"):
        read(folder, reader, tasks, {"t": ["a,b", "a"]}, csv={"list_separator": ","})


@pytest.mark.parametrize(
    ("option", "value"),
    [("column_names", ["id", "text", "t"]), ("na_values", ["a"]), ("sep", "::"), ("encoding", "nonsense")],
)
def test_other_options_of_the_card_are_refused(option: str, value: Any, folder: Path) -> None:
    for split in ("train", "validation"):
        write(folder, "hub csv", split, {"t": ["a", "b"]})
    write_card(folder, {"configs": [{**FILES, option: value}]})
    with pytest.raises(DataError, match=rf"data\.hub\.name: .*`{option}: .*Download .* `source: csv`"):
        hub(folder)


@pytest.mark.parametrize(
    ("option", "value"), [("sep", "^"), ("delimiter", "^"), ("encoding", "cp1252"), ("engine", "python")]
)
def test_options_of_the_card_are_read(option: str, value: str, folder: Path) -> None:
    mark = "^" if value == "^" else ","
    for split in ("train", "validation"):
        lines = ["id,text,t", f"{split}1,caf\u00e9,a", f"{split}2,two,b"]
        content = "\n".join(lines).replace(",", mark)
        (folder / f"{split}.csv").write_text(content, encoding="cp1252" if value == "cp1252" else "utf-8")
    write_card(folder, {"configs": [{**FILES, option: value}]})
    assert [row.text for row in hub(folder).splits["train"]] == ["caf\u00e9", "two"]


@pytest.mark.parametrize("reader", ["hub csv", "hub jsonl", "hub parquet"])
def test_numbers_are_the_classes_that_the_card_names(reader: str, folder: Path) -> None:
    for split in ("train", "validation"):
        write(folder, reader, split, {"t": [1, 0, -1, None]})
    label = {"class_label": {"names": {"0": "calm", "1": "angry"}}}
    text = [{"name": name, "dtype": "string"} for name in ("id", "text")]
    write_card(folder, {"dataset_info": {"features": [*text, {"name": "t", "dtype": label}]}})
    rows = hub(folder).splits["train"]
    assert [row.labels.get("t") for row in rows] == ["angry", "calm", None, None]


@pytest.mark.parametrize("cells", [["1.0", "", "angry ", "0"], ["angry", " ", "1", "calm"]])
def test_csv_has_names_or_numbers_of_the_classes_of_its_card(cells: list[str], folder: Path) -> None:
    label = {"class_label": {"names": {"0": "calm", "1": "angry"}}}
    write_card(folder, {"dataset_info": {"features": [{"name": "t", "dtype": label}]}})
    for split in ("train", "validation"):
        write(folder, "hub csv", split, {"t": cells})
    assert [row.labels.get("t") for row in hub(folder).splits["train"]] == ["angry", None, "angry", "calm"]
    for split in ("train", "validation"):
        write(folder, "hub csv", split, {"t": [*cells, "2", "1.5", "clam"]})
    with pytest.raises(DataError, match=r"labels\.t must be a class of the data set, but got ") as caught:
        hub(folder)
    assert str(caught.value).startswith("6 bad rows")
    assert "Did you mean `calm`" in str(caught.value)


def test_settings_of_the_study_replace_those_of_the_card(folder: Path) -> None:
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_text(f"id^text^t\n{split}1^one^a\n{split}2^two^b\n")
    write_card(folder, {"configs": [{**FILES, "sep": "::"}]})
    assert [row.text for row in hub(folder, csv={"delimiter": "^"}).splits["train"]] == ["one", "two"]
