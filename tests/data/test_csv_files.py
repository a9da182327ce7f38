"""Encodings, delimiters and quotes of csv files."""

import csv
import io
import logging
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load_set

from hpo.data.dataset import DataSet

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
def test_files_of_a_german_excel_are_read(
    encoding: str,
    delimiter: str,
    form: dict[str, str],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    content = excel(ROWS, delimiter, form.get("list_separator", "|"))
    dataset = load(tmp_path, content.encode(encoding), **form)
    for split in ("train", "validation"):
        assert [example.labels for example in dataset.splits[split]] == EXPECTED
        assert [example.text for example in dataset.splits[split]] == [row[0] for row in ROWS[1:]]
    told = [message for message in caplog.messages if "read with" in message]
    assert told == ([f"{tmp_path / split}.csv: {said}" for split in ("train", "validation")] if said else [])
