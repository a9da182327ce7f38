"""How csv files are written is found out, said, and may be given."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from excel_files import excel
from jsonl_sets import load_set

from hpo.data.csv_files import is_western
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


@pytest.mark.parametrize(
    ("encoding", "delimiter", "separator", "said"),
    [
        ("utf-8-sig", ";", ";", "read with `;`"),
        ("cp1252", ";", ",", "read with `;`, decoded as cp1252"),
        ("utf-16", "\t", ",", "read with tab, decoded as utf-16"),
        ("utf-8", ";", "|", "read with `;`"),
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


@pytest.mark.parametrize(
    ("form", "encoding", "said"),
    [
        ({"delimiter": ","}, "utf-8", "read with `;`, not as `data.csv` says"),
        ({"encoding": "latin-1"}, "utf-8", "read with `;`, decoded as utf-8, not as `data.csv` says"),
        ({"encoding": "shift_jis"}, "utf-16", "read with `;`, decoded as utf-16, not as `data.csv` says"),
    ],
)
def test_a_form_that_the_file_contradicts_is_passed_over_and_said(
    form: dict[str, str], encoding: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    dataset = load(tmp_path, excel(ROWS).encode(encoding), **form)
    assert [example.labels for example in dataset.splits["train"]] == EXPECTED
    assert f"{tmp_path / 'train'}.csv: {said}" in caplog.messages


@pytest.mark.parametrize(("empty", "tags"), [("none", []), ("unlabelled", None)])
def test_what_an_empty_cell_means(empty: str, tags: list[str] | None, tmp_path: Path) -> None:
    dataset = load(tmp_path, excel(ROWS).encode(), empty=empty)
    example = dataset.splits["train"][2]
    assert example.labels.get("tags") == tags
    assert ("tags" in example.annotated) == (tags is not None)
    assert "grade" not in example.annotated


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
    with pytest.raises(DataError, match=r"validation.csv:2: labels.tags: unknown class `a\|b`"):
        load_set(tmp_path, "csv", tasks=tasks, columns=columns)


GOOD = excel(ROWS)


@pytest.mark.parametrize(
    ("content", "csv", "message"),
    [
        (b"\xef\xbb\xbf\r\n", {}, "the file is empty"),
        (GOOD.split("\r\n")[0].encode(), {}, "the train split must have rows, but it is empty"),
        (
            GOOD.replace(";", ":").encode(),
            {},
            "has no column `Text` (read with `,`; `data.csv.delimiter` sets it). Known: Text:Ton:",
        ),
        (
            GOOD.replace("Note", "Noten").encode(),
            {},
            "no column `Note` (read with `;`; `data.csv.delimiter` sets it). Did you mean `Noten`?",
        ),
        (GOOD.encode("cp1252"), {"encoding": "utf-8"}, "must be utf-8, but cannot be decoded so: invalid"),
        (GOOD.encode("utf-16-le"), {}, "which `data.csv.encoding: utf-16-le` reads"),
        (
            GOOD.encode().partition(b"\xb6")[0],
            {},
            "must be utf-8, but cannot be decoded so: unexpected end of data",
        ),
        (GOOD.encode("utf-16")[:-1], {}, "must be utf-16, but cannot be decoded so: truncated data"),
        (GOOD.partition("\nund")[0].encode(), {}, "train.csv:3: must be CSV, but the row that begins here"),
        (b"PK\x03\x04\x14\0", {}, "it holds zero bytes: it is of another format"),
        ("Text;Ton\nпоздно и дорого;x\n".encode("cp1251"), {}, "name its encoding in `data.csv.encoding`"),
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
    ("text", "encoding", "western"),
    [
        ("Das Gerät läuft größtenteils schön, 5 € für Müller", "cp1252", True),
        ("¿Qué pasó mañana? Señor Núñez…", "cp1252", True),
        ("ÜBERGRÖSSE FÜR ÄRZTE", "cp1252", True),
        ("Очень поздно приехал курьер", "cp1251", False),
        ("Zażółć gęślą jaźń, późno", "cp1250", False),
        ("谢谢你们", "gbk", False),
    ],
)
def test_a_text_in_another_alphabet_does_not_look_western(text: str, encoding: str, western: bool) -> None:
    assert is_western(text.encode(encoding)) == western
