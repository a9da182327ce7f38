"""Encodings, delimiters and quotes of csv files."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load_set

from hpo.data.dataset import DataSet
from hpo.errors import DataError

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


def load(folder: Path, content: bytes, *, tasks: Any = TASKS, columns: Any = COLUMNS, **form: Any) -> DataSet:
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_bytes(content)
    return load_set(folder, "csv", tasks=tasks, columns=columns, csv=form)


@pytest.mark.parametrize(
    ("encoding", "form"),
    [
        ("utf-8-sig", {"delimiter": ";"}),
        ("cp1252", {"delimiter": ";", "encoding": "cp1252", "list_separator": ","}),
        ("utf-16", {"delimiter": "tab", "encoding": "utf-16"}),
    ],
)
def test_files_of_a_german_excel_are_read(encoding: str, form: dict[str, str], tmp_path: Path) -> None:
    delimiter = form["delimiter"].replace("tab", "\t")
    content = excel(ROWS, delimiter, form.get("list_separator", "|"))
    dataset = load(tmp_path, content.encode(encoding), **form)
    for split in ("train", "validation"):
        assert [example.labels for example in dataset.splits[split]] == EXPECTED
        assert [example.text for example in dataset.splits[split]] == [row[0] for row in ROWS[1:]]


GOOD = excel(ROWS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf", "the file is empty"),
        (
            GOOD.replace(";", ":").encode(),
            "It was read with `;`: see `data.csv.delimiter`.",
        ),
        (GOOD.encode("cp1252"), "must be UTF-8, but cannot be decoded: "),
        (GOOD.encode("utf-16"), "Save it as UTF-8 text, or name its encoding in `data.csv.encoding`"),
        (GOOD.partition("\nund")[0].encode(), "train.csv:3: must be CSV, but the row that begins here"),
    ],
)
def test_errors_of_unreadable_files_name_the_option(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        load(tmp_path, content, delimiter=";")


def test_a_text_of_a_million_characters_is_read_whole(tmp_path: Path) -> None:
    text = "Grüße; " * 150_000
    dataset = load(tmp_path, excel([*ROWS, [text, "freundlich", "spät", "1"]]).encode(), delimiter=";")
    assert dataset.splits["train"][-1].text == text
