"""Encodings, delimiters and quotes of csv files."""

from __future__ import annotations

import logging
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
    """As Excel writes it: CRLF, and quotes where they are needed."""

    def cell(text: str) -> str:
        if not text.startswith("["):
            text = text.replace("|", separator)
        return '"' + text.replace('"', '""') + '"' if set(text) & {delimiter, '"', "\n"} else text

    return "".join(delimiter.join(map(cell, row)) + "\r\n" for row in rows)


def load(folder: Path, content: bytes, *, tasks: Any = TASKS, columns: Any = COLUMNS, **csv: Any) -> DataSet:
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_bytes(content)
    return load_set(folder, "csv", tasks=tasks, columns=columns, csv=csv)


@pytest.mark.parametrize(
    ("encoding", "delimiter", "csv", "said"),
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
    csv: dict[str, str],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    content = excel(ROWS, delimiter, csv.get("list_separator", "|"))
    dataset = load(tmp_path, content.encode(encoding), **csv)
    for split in ("train", "validation"):
        assert [example.labels for example in dataset.splits[split]] == EXPECTED
        assert [example.text for example in dataset.splits[split]] == [row[0] for row in ROWS[1:]]
    told = [message for message in caplog.messages if "read with" in message]
    assert told == ([f"{tmp_path / split}.csv: {said}" for split in ("train", "validation")] if said else [])


GOOD = excel(ROWS)


@pytest.mark.parametrize(
    ("content", "csv", "message"),
    [
        (b"\xef\xbb\xbf\r\n", {}, "the file is empty"),
        (
            GOOD.replace(";", ":").encode(),
            {},
            "has no column `Text` (read with `,`; `data.csv.delimiter` sets it). Known: Text:Ton:",
        ),
        (GOOD.encode("cp1252"), {}, "must be UTF-8, but cannot be decoded: invalid"),
        (GOOD.encode("utf-16"), {}, "holds zero bytes, as UTF-16 does. Save it as UTF-8 text, or"),
        (GOOD.partition("\nund")[0].encode(), {}, "train.csv:3: must be CSV, but the row that begins here"),
        (
            GOOD.replace("spät|teuer", "['spät']").encode(),
            {},
            "labels.tags must be JSON in double quotes",
        ),
    ],
)
def test_errors_of_unreadable_files_name_the_option(
    content: bytes, csv: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, content, **csv)
    assert message in str(caught.value)
    assert str(tmp_path / "train.csv") in str(caught.value)


def test_a_text_of_a_million_characters_is_read_whole(tmp_path: Path) -> None:
    text = "Grüße; " * 150_000
    dataset = load(tmp_path, excel([*ROWS, [text, "freundlich", "spät", "1"]]).encode())
    assert dataset.splits["train"][-1].text == text
