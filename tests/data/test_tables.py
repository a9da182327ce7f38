"""csv, jsonl, parquet and the hub read a cell in the same way: the table of `hpo.data.tables`."""

import csv
import json
import re
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from support.jsonl_sets import load
from support.tiny_tokenizers import FAMILIES, tiny_tokenizer, tokenize_split

from hpo.config.data_config import DataConfig
from hpo.data.dataset import DataSet, load_data
from hpo.errors import DataError
from hpo.tasks.kind import Task, kind_of
from hpo.tasks.tokenized_split import Windowing

READERS = ["jsonl", "csv", "parquet", "hub csv", "hub jsonl", "hub parquet"]
SPLITS = ("train", "validation")
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
            csv.writer(file).writerows([list(table), *(map(text, row.values()) for row in rows)])
    elif suffix == "parquet":
        pq.write_table(pa.table(table), path)
    else:
        rows = [{name: plain(cell) for name, cell in row.items()} for row in rows]
        for row in rows if reader == "jsonl" else ():
            labels = {name: row.pop(name) for name in [*row] if name not in ("id", "text", "spans", "group")}
            row |= {"spans": {"person": row.get("spans")}, "labels": labels}
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read(folder: Path, reader: str, tasks: dict[str, Any], columns: Columns, **more: Any) -> DataSet:
    """Load the columns as training and validation data; `spans` are those of the task `names`."""
    folder = folder / reader.replace(" ", "_")
    folder.mkdir(parents=True)
    for split in SPLITS:
        write(folder, reader, split, columns)
    source = reader.partition(" ")[0]
    at: dict[str, Any] = {"hub": {"name": str(folder)}} if source == "hub" else {"path": str(folder)}
    if source != "jsonl":
        labels = {name: name for name in columns if name not in ("spans", "group")}
        spans = {"names": "spans"} if "spans" in columns else {}
        group = {"group": "group"} if "group" in columns else {}
        at["columns"] = {"id": "id", "labels": labels, "spans": spans, **group}
    return load(source=source, tasks=tasks, **at, **more)


WORDS = ["None", "NA", "nan", "null", "<NA>"]
BRACKETS = ["[NAME]", "[unknown] a", "[1] see", "[0, 10)", "a[]"]
CODES = ["007", "1e3", "1.50", "2024-01-01", "1_0"]
ONE, MANY, NUMBER = "single_label", "multi_label", "regression"
CELLS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "words": (ONE, WORDS, WORDS),
    "brackets": (ONE, BRACKETS, BRACKETS),
    "codes": (ONE, CODES, CODES),
    "blank": (ONE, ["yes", "", " \t", None, "no"], ["yes", None, None, None, "no"]),
    "spaces": (ONE, ["pos", "pos ", "\tpos", "\u00a0pos", "neg"], ["pos"] * 4 + ["neg"]),
    "accents": (ONE, ["caf\u00e9", "cafe\u0301", "t", "t", None], ["caf\u00e9", "caf\u00e9", "t", "t", None]),
    "integers": (ONE, [0, 1, None, 2**53 + 1, -3], ["0", "1", None, "9007199254740993", "-3"]),
    "booleans": (ONE, [True, False, None, True, True], ["True", "False", None, "True", "True"]),
    "lists": (MANY, [["a", "b"], [], ["a "], [" b"], []], [["a", "b"], [], ["a"], ["b"], []]),
    "joined": (MANY, ["a|b", '["a"]', "", "  ", " b "], [["a", "b"], ["a"], [], [], ["b"]]),
    "numbers": (NUMBER, [1.5, -2.0, None, 1e300 / 1e200, 0.0], [1.5, -2.0, None, 1e100, 0.0]),
    "whole": (NUMBER, [1, -2, None, 2**53, 0], [1.0, -2.0, None, 2.0**53, 0.0]),
    "decimals": (NUMBER, [Decimal("1.25"), None, Decimal("-3.00"), None, None], [1.25, None, -3, None, None]),
    "digits": (NUMBER, ["1.5", " 2 ", "1e3", "", None], [1.5, 2.0, 1000.0, None, None]),
}  # fmt: skip
TASKS = {name: {"kind": kind} for name, (kind, _, _) in CELLS.items()}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_reads_equal_cells(reader: str, tmp_path: Path) -> None:
    dataset = read(tmp_path, reader, TASKS, {name: cells for name, (_, cells, _) in CELLS.items()})
    for name, (_, _, expected) in CELLS.items():
        for split in ("train", "validation"):
            assert [row.labels.get(name) for row in dataset.splits[split]] == expected, name
    labels = {task.name: set(task.labels) for task in dataset.tasks}
    assert (labels["spaces"], labels["accents"]) == ({"pos", "neg"}, {"café", "t"})


@pytest.mark.parametrize("cell", [1, 1.0, Decimal(1), "1", "1.0", " 1 "])
@pytest.mark.parametrize("declared", ["1", "1.0"])
def test_whole_numbers_match_declared_classes(cell: Any, declared: str) -> None:
    """pandas writes 1.0 to csv where a column of whole numbers has an empty cell; 5.10 is no number."""
    kind = kind_of(Task("t", ONE, (declared, "5.1", "5.10", "01")))
    assert kind.label(cell) == declared
    assert [kind.label(version) for version in ("5.1", "5.10", "01")] == ["5.1", "5.10", "01"]


ONE_CLASS = " must be one class, as text or a whole number, but got "


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_reports_a_bad_cell(reader: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, reader, {"t": {"kind": ONE, "classes": ["a", "b"]}}, {"t": ["a", "[1 2]"]})
    first, *rest = str(caught.value).splitlines()
    assert first == "2 bad rows in the data; mend or remove:"
    assert [f"labels.t{ONE_CLASS}'[1 2]'" in line for line in rest] == [True, True]


# Spans

PERSON = {"names": {"kind": "token_classification", "span_names": ["person"]}}


@pytest.mark.parametrize("reader", READERS)
def test_spans_may_be_objects_of_start_and_end(reader: str, tmp_path: Path) -> None:
    cells = [[{"start": 0, "end": 3}], [], [{"start": 7, "end": 11}, {"start": 0, "end": 3}]]
    rows = read(tmp_path, reader, PERSON, {"spans": cells}).splits["train"]
    assert [row.spans.get("person", []) for row in rows] == [[(0, 3)], [], [(0, 3), (7, 11)]]


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader != "jsonl"])
def test_spans_of_several_names_are_objects(reader: str, tmp_path: Path) -> None:
    names = {"names": {"kind": "token_classification", "span_names": ["person", "place"]}}
    cells = [{"person": [[0, 3]], "place": [[7, 11]]}, {"person": [], "place": [[7, 11]]}, None]
    rows = read(tmp_path, reader, names, {"spans": cells}).splits["train"]
    place = {"place": [(7, 11)]}
    assert [dict(row.spans) for row in rows] == [{"person": [(0, 3)], **place}, place, {}]
    assert [bool(row.annotated) for row in rows] == [True, True, False]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["ann", " ann ", "", None, "  ", "0"], ["ann", "ann", None, None, None, "0"]),
        ([7, 0, 5], ["7", "0", "5"]),
    ],
)
def test_every_reader_reads_groups(
    reader: str, cells: list[Any], expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"group": cells, "t": ["a", "b", "a"] * (len(cells) // 3)}
    monkeypatch.setattr(f"{__name__}.SPLITS", ("train",))
    dataset = read(tmp_path, reader, {"t": {"kind": ONE}}, rows, validation_fraction=0.3)
    groups = {row.id: row.group for split in dataset.splits.values() for row in split}
    assert groups == {f"train{n}": group for n, group in enumerate(expected)}


@pytest.mark.parametrize("reader", READERS)
def test_a_group_in_two_splits_is_refused(reader: str, tmp_path: Path) -> None:
    rows = {"group": ["ann", None], "t": ["a", "b"]}
    with pytest.raises(DataError, match=r"1 bad row .*\n.*group must stay in one split, but `ann` is"):
        read(tmp_path, reader, {"t": {"kind": ONE}}, rows)


def test_bad_columns_of_groups_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "parquet", "train", {"author": [1.5, float("nan")], "t": ["a", "b"]})
    options = {"source": "parquet", "path": str(tmp_path), "tasks": {"t": {"kind": ONE}}}
    columns = {"id": "id", "labels": {"t": "t"}}
    with pytest.raises(
        DataError, match=r"2 bad rows(.|\n)*`group` must be text or a whole number, but got n"
    ):
        load(columns={**columns, "group": "author"}, **options)
    with pytest.raises(DataError, match=r"has no column `auther`\. Did you mean `author`"):
        load(columns={**columns, "group": "auther"}, **options)


# Forms of other programs

LISTS = [
    "['a', 'b']",
    "['a' 'b']",
    "['a'\n 'b']",
    "('a', 'b')",
    "{'a', 'b'}",
    "{a,b}",
    '{"a",b}',
    '["a", "b"]',
    "a|b",
]


@pytest.mark.parametrize("cell", LISTS)
def test_lists_of_other_programs_are_read(cell: str, tmp_path: Path) -> None:
    rows = read(
        tmp_path, "csv", {"t": {"kind": MANY}}, {"t": [cell, "('it, s',)", "{}", "(see note)"]}
    ).splits["train"]
    assert [row.labels["t"] for row in rows] == [["a", "b"], ["it, s"], [], ["(see note)"]]


@pytest.mark.parametrize("cell", ["[a, b]", "[1 2]", "{'a': 1}", "['a', None]", "['\\q']"])
def test_other_text_in_brackets_is_refused(cell: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a list, as"):
        read(tmp_path, "csv", {"t": {"kind": MANY}}, {"t": ["a", cell]})


def numbers_of(folder: Path, cells: list[str], delimiter: str) -> list[Any]:
    """Return the numbers of training rows; the validation rows have the first cell alone."""
    for split, part in (("train", cells), ("validation", cells[:1])):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = [("text", "t"), *(("Ann", cell) for cell in part)]
            csv.writer(file, delimiter=delimiter).writerows(rows)
    task = {"t": {"kind": NUMBER}}
    dataset = load(source="csv", path=str(folder), tasks=task, columns={"labels": {"t": "t"}})
    numbers = [row.labels["t"] for row in dataset.splits["train"]]
    assert dataset.splits["validation"][0].labels["t"] == numbers[0]
    return numbers


@pytest.mark.parametrize(
    ("cells", "delimiters", "expected"),
    [
        (["1.234", "999,5", "12,25"], ";\t", [1234, 999.5, 12.25]),
        (["7,800", "250", "1,5"], ";\t|", [7.8, 250, 1.5]),
        (["7,800", "250", "0.5"], ",;\t|", [7800, 250, 0.5]),
        (["7,800", "1,234,567"], ",;\t|", [7800, 1234567]),
        (["1.234", "250"], ",", [1.234, 250]),
        (["1\u202f234", "1'234", "1\u2019234.5", "1 234"], ",;", [1234, 1234, 1234.5, 1234]),
        (
            ["\u22123", "\u20133", "\uff13", "\u0663\u066b\u0665", "+.5", "1E3"],
            ",;",
            [-3, -3, 3, 3.5, 0.5, 1000],
        ),
    ],
)
def test_all_numbers_of_a_column_have_one_reading(
    cells: list[str], delimiters: str, expected: list[float], tmp_path: Path
) -> None:
    for delimiter in delimiters:
        assert numbers_of(tmp_path, cells, delimiter) == expected


def test_decided_numbers_equal_pandas(tmp_path: Path) -> None:
    cells = ["1.234", "999,5", "1.250,5", "-3"]
    assert numbers_of(tmp_path, cells, ";") == list(
        pd.read_csv(tmp_path / "train.csv", sep=";", decimal=",", thousands=".")["t"]
    )


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["7,800", "250"], r"`7,800` \(.*train\.csv:2\) is 7800 or 7\.8, and no number tells which"),
        (["1.234", "250"], r"`1\.234` .* is 1\.234 or 1234"),
        (["1.5", "2,5"], r"`1\.5` .* has `\.` and `2,5` .* has `,`"),
        *[
            ([cell], "must be a finite number, but got")
            for cell in ("1_03", "007", "12%", "(5)", "5-", "0x1F", "5 \u20ac")
        ],
    ],
)
def test_numbers_of_two_readings_are_refused(cells: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        numbers_of(tmp_path, cells, "\t")


# Multi-hot


def test_columns_of_0_and_1_are_classes(tmp_path: Path) -> None:
    for split in SPLITS:
        lines = ["text,joy,anger,fear", "x,1,0,0", "y,0.0,True,1", "z,0,0,0", "u,,,"]
        (tmp_path / f"{split}.csv").write_text("\n".join(lines))
    columns = {"labels": {"t": ["joy", "anger", "fear"]}}
    dataset = load(source="csv", path=str(tmp_path), tasks={"t": {"kind": MANY}}, columns=columns)
    assert dataset.tasks[0].labels == ("joy", "anger", "fear")
    assert [row.labels.get("t") for row in dataset.splits["train"]] == [["joy"], ["anger", "fear"], [], None]
    (tmp_path / "train.csv").write_text("text,joy,anger,fear\nx,1,0,x\ny,1,,0")
    with pytest.raises(
        DataError, match=r"column fear must be 0 or 1, but got 'x'\n.*column anger must be 0 or 1"
    ):
        load(source="csv", path=str(tmp_path), tasks={"t": {"kind": MANY}}, columns=columns)


@pytest.mark.parametrize(
    "cells", [["[1, 0]", "[0, 1]"], ["1|0|0", "0|1|0"], ["0", "1"], ["[true, false]", "[false, true]"]]
)
def test_rows_of_0_and_1_are_no_classes(cells: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="multi-hot"):
        read(tmp_path / "inferred", "csv", {"t": {"kind": MANY}}, {"t": cells})
    if len(cells[0]) > 1:
        with pytest.raises(DataError, match="multi-hot"):
            read(
                tmp_path / "declared", "csv", {"t": {"kind": MANY, "classes": ["joy", "fear"]}}, {"t": cells}
            )


def test_classes_may_be_called_0_and_1(tmp_path: Path) -> None:
    cells = ["[0]", "[0, 1]", "1"]
    rows = read(tmp_path, "csv", {"t": {"kind": MANY}}, {"t": cells}).splits["train"]
    assert [row.labels["t"] for row in rows] == [["0"], ["0", "1"], ["1"]]


# Texts


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader != "jsonl"] + ["flat jsonl"])
def test_every_reader_reads_pairs_as_the_tokenizer_does(reader: str, tmp_path: Path) -> None:
    first, second = ["Who ran? ", " Why", "x"], ["Ann  ran.", "", "\u00e9 y"]
    (tmp_path := tmp_path / "rows").mkdir()  # `datasets` takes a folder with `test` in its name for a split
    for split in SPLITS:
        write(tmp_path, reader.replace("flat", "hub"), split, {"q": first, "c": second, "t": ["a", "b", "a"]})
    source, tasks = reader.split()[-1 if "flat" in reader else 0], {"t": {"kind": ONE}}
    at = {"hub": {"name": str(tmp_path)}} if source == "hub" else {"path": str(tmp_path)}
    config = DataConfig.model_validate(
        {"source": source, "tasks": tasks, "columns": {"text": ["q", "c"], "labels": {"t": "t"}}, **at}
    )
    data = load_data(config)
    assert [row.id for row in data.splits["train"]] == ["train-1", "train-2", "train-3"]
    for family in FAMILIES:
        tokenizer = tiny_tokenizer(family)
        split = tokenize_split(
            data.splits["train"], data.tasks, tokenizer, Windowing(64, pair_segments=config.pair)
        )
        ids = [split.input_ids_T[a:b].tolist() for a, b in pairwise(split.window_start_W1)]
        assert ids == tokenizer(first, second)["input_ids"]


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader != "jsonl"] + ["flat jsonl"])
def test_every_reader_reads_tags(reader: str, tmp_path: Path) -> None:
    rows = {"tokens": [["Ann", "Lee", "ran"], ["So"]], "tags": [["B-x", "I-x", "O"], ["I-x"]]}
    (tmp_path := tmp_path / "rows").mkdir()  # `datasets` takes a folder with `test` in its name for a split
    for split in SPLITS:
        write(tmp_path, reader.replace("flat", "hub"), split, rows)
    source = reader.split()[-1 if "flat" in reader else 0]
    at: dict[str, Any] = {"hub": {"name": str(tmp_path)}} if source == "hub" else {"path": str(tmp_path)}
    tasks = {"ner": {"kind": "token_classification", "span_names": ["x"]}}
    data = load(source=source, tasks=tasks, columns={"tokens": "tokens", "tags": {"ner": "tags"}}, **at)
    assert [(row.text, dict(row.spans)) for row in data.splits["train"]] == [
        ("Ann Lee ran", {"x": [(0, 7)]}),
        ("So", {"x": [(0, 2)]}),
    ]
    (warning,) = data.span_warnings("ner")
    assert warning.startswith("2 of 8 tags are faults of BIO (IOB2)")


def test_tokens_in_text_must_be_json(tmp_path: Path) -> None:
    for split in SPLITS:
        write(tmp_path, "csv", split, {"tokens": ["['Ann', 'ran']"], "tags": [["B-x", "O"]]})
    columns = {"tokens": "tokens", "tags": {"ner": "tags"}}
    tasks = {"ner": {"kind": "token_classification", "span_names": ["x"]}}
    with pytest.raises(DataError, match="must be lists, in text as JSON"):
        load(source="csv", path=str(tmp_path), tasks=tasks, columns=columns)


def test_flat_rows_of_jsonl_may_lack_a_key(tmp_path: Path) -> None:
    rows = '{"text": "a", "label": "x"}\n{"text": "b", "label": 7}\n{"text": "c"}\n'
    for split in SPLITS:
        (tmp_path / f"{split}.jsonl").write_text(rows)
    options = {"source": "jsonl", "path": str(tmp_path), "tasks": {"t": {"kind": ONE}}}
    data = load(columns={"labels": {"t": "label"}}, **options)
    assert [row.labels for row in data.splits["train"]] == [{"t": "x"}, {"t": "7"}, {}]
    with pytest.raises(DataError, match=r"has no column `lable`\. Did you mean `label`"):
        load(columns={"labels": {"t": "lable"}}, **options)
    native = '{"text": "a", "labels": {"t": "x"}}\n{"id": null, "text": "b", "labels": {"t": "y"}}\n'
    for split in SPLITS:
        (tmp_path / f"{split}.jsonl").write_text(native)
    assert [row.id for row in load(**options).splits["validation"]] == ["validation-1", "validation-2"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"columns": {"text": ["a"]}}, "must be a column, or [first, second] for pairs of texts"),
        ({"columns": {"text": ["a", "b"], "spans": {"t": "s"}}}, "need `pair_segments` of jsonl"),
        ({"columns": {"tags": {"t": "s"}}}, "must be given with `tags`, and replaces `text`"),
        ({"pair_segments": ["a", "b"]}, "Two columns of texts are `columns: {text: [first, second]}`"),
        ({"source": "conll", "columns": {"tokens": "words", "tags": {"t": 1}}}, "for conll, in numbers"),
    ],
)
def test_contradicting_columns_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        load(**{"source": "csv", "path": "x", "tasks": {"t": {"kind": ONE}}, **config})
