"""How csv files are written is found out, said, and may be given."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from excel_files import excel
from jsonl_sets import load_set

from hpo.data.csv_files import looks_western
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


def load(folder: Path, content: bytes, *, tasks: Any = TASKS, columns: Any = COLUMNS, **csv: Any) -> DataSet:
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_bytes(content)
    return load_set(folder, "csv", tasks=tasks, columns=columns, csv=csv)


@pytest.mark.parametrize("separator", ["|", ",", ";"])
@pytest.mark.parametrize(
    ("encoding", "delimiter", "said"),
    [
        ("utf-8-sig", ";", "read with `;`, decoded as utf-8 (byte order mark), CRLF line ends"),
        ("cp1252", ";", "read with `;`, decoded as cp1252, CRLF line ends"),
        ("utf-16", "\t", "read with tab, decoded as utf-16 (byte order mark), CRLF line ends"),
        ("utf-8", ";", "read with `;`, CRLF line ends"),
    ],
)
def test_what_a_german_excel_writes_is_read(
    encoding: str, delimiter: str, separator: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    dataset = load(tmp_path, excel(ROWS, delimiter, separator).encode(encoding))
    for split in ("train", "validation"):
        assert [example.labels for example in dataset.splits[split]] == EXPECTED
        assert [example.text for example in dataset.splits[split]] == [row[0] for row in ROWS[1:]]
        assert f"{tmp_path / split}.csv: {said}" in caplog.messages
    lists = f"{tmp_path / 'train.csv'}: cells of `Schlagwörter` are lists with `{separator}`"
    assert caplog.messages.count(lists) == (separator != "|")


def test_a_given_form_gives_the_same_data(tmp_path: Path) -> None:
    guessed = load(tmp_path, excel(ROWS, ";", ",").encode("cp1252"))
    form = {"delimiter": ";", "list_separator": ",", "encoding": "latin-1"}
    content = excel([[cell.replace(" €", " Euro") for cell in row] for row in ROWS], ";", ",")
    given = load(tmp_path, content.encode("latin-1"), **form)
    assert [example.labels for example in given.splits["train"]] == EXPECTED
    assert given.tasks == guessed.tasks
    tab = load(tmp_path, excel(ROWS, "\t").encode(), delimiter="tab", encoding="utf-8")
    assert tab.fingerprint == guessed.fingerprint


def test_plain_csv_is_read_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    load(tmp_path, excel(ROWS, ",").replace("2,5", "2.5").encode())
    assert [message for message in caplog.messages if "reading" not in message] == []


def test_the_first_line_of_excel_may_name_the_delimiter(tmp_path: Path) -> None:
    content = "sep=|\r\n" + excel([[cell.replace("|", ",") for cell in row] for row in ROWS], "|", ",")
    dataset = load(tmp_path, content.encode("cp1252"))
    assert [example.labels for example in dataset.splits["train"]] == EXPECTED
    with pytest.raises(DataError, match=r"train.csv:3: must have 4 cells as the header has, but got 1"):
        load(tmp_path, b"sep=;\r\nText;Ton;" + "Schlagwörter;Note\r\nx\r\n".encode())


@pytest.mark.parametrize(("empty", "tags"), [("none", []), ("unlabelled", None)])
def test_what_an_empty_cell_means(empty: str, tags: list[str] | None, tmp_path: Path) -> None:
    dataset = load(tmp_path, excel(ROWS).encode(), empty=empty)
    example = dataset.splits["train"][2]
    assert example.labels.get("tags") == tags
    assert ("tags" in example.annotated) == (tags is not None)
    assert "grade" not in example.annotated


def test_empty_cells_of_spans_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    tasks = {"names": {"kind": "token_classification", "span_names": ["who"]}}
    columns = {"spans": {"names": "who"}}
    load(tmp_path, b'text,who\nAnn sings,"[[0, 3]]"\nyes,\nno,\n', tasks=tasks, columns=columns)
    said = "2 empty cells of `who` read as not labelled; `[]` says no span"
    assert caplog.messages.count(f"{tmp_path / 'train.csv'}: {said}") == 1


@pytest.mark.parametrize(
    ("cells", "classes", "said"),
    [
        (["late, dear", "late", "dear, rude"], ["dear", "late", "rude"], "are lists with `,`"),
        (["late;dear", "late;rude", "dear"], ["dear", "late", "rude"], "are lists with `;`"),
        (["house, garden", "work"], ["house, garden", "work"], "hold `,` and are read as one class each"),
        (["house, garden|work", "work"], ["house, garden", "work"], None),
    ],
)
def test_lists_of_classes_that_nobody_named(
    cells: list[str], classes: list[str], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    content = "text,tags\n" + "".join(f'x,"{cell}"\n' for cell in cells)
    columns = {"labels": {"tags": "tags"}}
    dataset = load(tmp_path, content.encode(), tasks={"tags": {"kind": "multi_label"}}, columns=columns)
    assert list(dataset.tasks[0].labels) == classes
    about = [message.split("` ", 1)[1] for message in caplog.messages if "cells of `tags`" in message]
    assert [text[: len(said or "")] for text in about] == ([said] if said else [])


def test_the_training_file_decides_for_all_splits(tmp_path: Path) -> None:
    columns, tasks = {"labels": {"tags": "tags"}}, {"tags": {"kind": "multi_label", "classes": ["a", "b"]}}
    (tmp_path / "train.csv").write_text('text,tags\nx,"a,b"\ny,a\n')
    (tmp_path / "validation.csv").write_text("text,tags\nx,a|b\n")
    message = r"validation.csv:2: column tags: `a\|b` is several classes if `\|` separates them, but `,` does"
    with pytest.raises(DataError, match=message + r" \(`data.csv.list_separator`\)"):
        load_set(tmp_path, "csv", tasks=tasks, columns=columns)


GOOD = excel(ROWS)


@pytest.mark.parametrize(
    ("content", "csv", "message"),
    [
        (b"", {}, "the file is empty; its first line must name the columns"),
        (b"\xef\xbb\xbf\r\n", {}, "the file is empty"),
        (GOOD.split("\r\n")[0].encode(), {}, "the train split must have rows, but it is empty"),
        (
            GOOD.encode(),
            {"delimiter": ","},
            "read with `,`, as `data.csv.delimiter` says, it has Text;Ton;Schlagwörter;Note. With `;` it",
        ),
        (
            GOOD.replace(";", ":").encode(),
            {},
            "its header is `Text:Ton:Schlagwörter:Note`, in which none of `,`, `;`, tab and `|`",
        ),
        (
            GOOD.replace("Note", "Noten").encode(),
            {},
            "no column `Note`. Did you mean `Noten`? (read with `;`",
        ),
        (GOOD.encode(), {"encoding": "ascii"}, "as `data.csv.encoding` says, must be ascii, but"),
        (GOOD.encode("cp1252"), {"encoding": "utf-8"}, "as `data.csv.encoding` says, must be utf-8, but"),
        (GOOD.encode("utf-16-le"), {}, "which `data.csv.encoding: utf-16-le` reads"),
        (
            GOOD.encode().partition(b"\xb6")[0],
            {},
            "must be UTF-8, but it ends within a character: it was cut",
        ),
        (GOOD.encode("utf-16")[:-1], {}, "by its byte order mark it is utf-16, but it cannot be decoded"),
        (
            GOOD.partition("\nund")[0].encode(),
            {},
            "train.csv:3: must be CSV, but a quote that opens in this row",
        ),
        (
            GOOD.partition("teuer;3")[0].encode(),
            {},
            "train.csv:6: must have 4 cells as the header has, but got",
        ),
        (b"PK\x03\x04\x14\0", {}, "this is an Excel workbook or another zip archive; save it as `CSV UTF-8`"),
        (b"PAR1\x15\0", {}, "this is a parquet file; set `data.source: parquet`"),
        (b'{"id": "1", "text": "a"}\n', {}, "has no column `Text`"),
        (b"\0\1\2\3", {}, "it holds zero bytes"),
        ("Text;Ton\nпоздно и дорого;x\n".encode("cp1251"), {}, "Name its encoding in `data.csv.encoding`"),
        (
            GOOD.replace("spät|teuer", "['spät']").encode(),
            {},
            "column Schlagwörter must be JSON in double quotes",
        ),
    ],
)
def test_a_file_that_cannot_be_read_names_the_option(
    content: bytes, csv: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, content, **csv)
    assert message in str(caught.value)
    assert str(tmp_path / "train.csv") in str(caught.value)


def test_a_text_of_a_million_characters_is_read_whole(tmp_path: Path) -> None:
    text = "Grüße; " * 150_000
    dataset = load(tmp_path, excel([*ROWS, [text, "freundlich", "spät", "1"]]).encode("cp1252"))
    assert dataset.splits["train"][-1].text == text


@pytest.mark.parametrize(
    ("text", "western"),
    [
        ("Das Gerät läuft größtenteils schön, 5 € für Müller", True),
        ("L\u2019été s\u2019achève à Besançon; «déjà» – naïve", True),
        ("¿Qué pasó mañana? Señor Núñez…", True),
        ("Очень поздно приехал курьер".encode("cp1251").decode("cp1252"), False),
        ("Zażółć gęślą jaźń, późno".encode("cp1250").decode("cp1252", "replace"), False),
        ("καθυστέρηση".encode("cp1253").decode("cp1252"), False),
    ],
)
def test_a_text_in_another_alphabet_does_not_look_western(text: str, western: bool) -> None:
    assert looks_western(text) == western
