"""Files of texts and of predictions: what is read, what is listed, and that nothing is half-written."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.tiny_encoders import KIND_TASKS, make_model

from hpo.data.examples import RowChecker
from hpo.errors import DataError, InputError
from hpo.inference.model import PredictedSpan, Prediction, TaskPrediction, TrainedModel
from hpo.inference.rows import check_output, predicted_row, predictions_file, read_examples
from hpo.models.encoder import load_tokenizer
from hpo.models.export import ExportSettings
from hpo.tasks.example import Example
from hpo.tasks.tokenized_split import Windowing

PREDICTION: Prediction = {
    "single": TaskPrediction("b", {"a": 0.25, "b": 0.5, "c": 0.25}),
    "multi": TaskPrediction(["a"], {"a": 0.9, "b": 0.1}),
    "number": TaskPrediction(1.5),
    "joint": TaskPrediction(spans=[PredictedSpan("x", 0, 4, "Zoë;")]),
    "overlapping": TaskPrediction(spans=[PredictedSpan("x", 0, 4, "Zoë;"), PredictedSpan("y", 5, 7, "is")]),
    "answer": TaskPrediction(),
    "evidence": TaskPrediction(spans=[PredictedSpan("a", 5, 12, 'is "in"')]),
}
EXAMPLE = Example("1", 'Zoë; is "in"\nRome', {}, {})
ROW: dict[str, Any] = {
    "id": "1",
    "text": EXAMPLE.text,
    "labels": {"single": "b", "multi": ["a"], "number": 1.5},
    "spans": {"x": [[0, 4]], "y": [[5, 7]], "a": [[5, 12]]},
    "scores": {"single": {"a": 0.25, "b": 0.5, "c": 0.25}, "multi": {"a": 0.9, "b": 0.1}},
}


def trained(
    pair: tuple[str, str] | None = None, form: dict[str, str | None] | None = None, **columns: str
) -> TrainedModel:
    windowing = Windowing(16, pair_segments=pair)
    settings = ExportSettings(
        windowing=windowing, attention="sdpa", precision="fp32", columns=columns, csv=form or {}
    )
    return TrainedModel(make_model(), load_tokenizer("minilm"), settings)


def read(path: Path, **columns: str) -> tuple[list[tuple[str, str]], list[str]]:
    examples, problems = read_examples(path, trained(**columns))
    bad = [": ".join(one) for one in problems]
    return [(example.id, example.text) for example in examples], bad


def test_a_predicted_row_is_a_data_row() -> None:
    row = predicted_row(EXAMPLE, PREDICTION)
    assert row == ROW
    tasks = [task for task in KIND_TASKS if task.name != "joint"]  # overlap is not for it
    example, problems = RowChecker(tasks, None, {}).check({k: v for k, v in row.items() if k != "scores"})
    assert not problems
    assert example is not None
    assert example.labels == ROW["labels"]
    paired = Example("1", "a b", {}, {}, {"q": (0, 1)})
    assert predicted_row(paired, {})["segments"] == {"q": [0, 1]}


def write_twice(path: Path) -> None:
    with predictions_file(path, KIND_TASKS) as write:
        write([ROW])
        write([{**ROW, "id": "2"}])


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_twice(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [ROW, {**ROW, "id": "2"}]
    assert read(path) == ([("1", ROW["text"]), ("2", ROW["text"])], [])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.{suffix}"
    write_twice(path)
    if suffix == "csv":
        with path.open(encoding="utf-8", newline="") as file:
            first, second = csv.DictReader(file)
        read_cell = json.loads
        assert first["labels.single"] == "b"
        assert read_cell(first["labels.number"]) == 1.5
    else:
        first, second = pq.read_table(path).to_pylist()
        read_cell = lambda cell: cell  # noqa: E731
    assert (first["id"], second["id"], first["text"]) == ("1", "2", ROW["text"])
    assert read_cell(first["labels.multi"]) == ["a"]
    assert read_cell(first["scores.single"]) == ROW["scores"]["single"]
    overlapping = {name: of for name, of in read_cell(first["spans.overlapping"]).items() if of}
    assert overlapping == {"x": [[0, 4]], "y": [[5, 7]]}
    assert "scores.number" not in first
    assert read(path) == ([("1", ROW["text"]), ("2", ROW["text"])], [])


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt)),
        (
            OSError(28, "No space left on device"),
            pytest.raises(InputError, match=r"out.csv: cannot be written: No space left on device\."),
        ),
    ],
    ids=["interrupted", "full disk"],
)
def test_predictions_are_written_completely_or_not_at_all(
    tmp_path: Path, error: BaseException, raised: Any
) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")

    def failing() -> Iterator[dict[str, Any]]:
        yield ROW
        raise error

    with raised, predictions_file(path, KIND_TASKS) as write:
        write(failing())
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("out.csv", "old")]


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for path, message in [
        (tmp_path / "out.xlsx", r"must end in \.jsonl, \.csv, \.parquet"),
        (tmp_path / "nowhere" / "out.csv", "nowhere is no folder that may be written"),
        (tmp_path / "folder.csv", "folder.csv is a folder"),
        (Path("/dev/null/out.csv"), "/dev/null is no folder that may be written"),
    ]:
        with pytest.raises(InputError, match=message):
            check_output(path)


def test_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("\ufeffZoë is in\r\n\n  two words \n\xff".encode("utf-8")[:-2] + b"\xff\nlast\n\n \n")
    texts, bad = read(path)
    assert texts == [("row-1", "Zoë is in"), ("row-3", "  two words "), ("row-5", "last")]
    assert bad[0] == f"{path}:2: `text` is empty"
    assert bad[1].startswith(f"{path}:4: must be UTF-8, but ")


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    rows = [
        '{"text": "one"}',
        '{"id": 7, "text": "two", "labels": {"nobody knows": 1}, "spans": 3}',
        '{"text": ',
        '{"id": "x"}',
        "[]",
        '{"text": "\\ud800"}',
    ]
    path.write_text("\n".join(rows))
    texts, bad = read(path)
    assert texts == [("row-1", "one"), ("7", "two")]
    assert [line.split(": ")[0] for line in bad] == [f"{path}:{number}" for number in (3, 4, 5, 6)]
    assert "`text` must be a string, but got None" in bad[1]
    assert "surrogate" in bad[3]


def test_tables_of_texts(tmp_path: Path) -> None:
    table, parquet = tmp_path / "texts.csv", tmp_path / "texts.parquet"
    table.write_text("key,body\nk1,one\nk2\nk3,\nk4,four\n")
    texts, bad = read(table, id="key", text="body")
    assert texts == [("k1", "one"), ("k4", "four")]
    assert bad == [
        f"{table}:3: must have 2 cells as the header has, but got 1 (read with `,`)",
        f"{table}:4: `text` is empty",
    ]
    assert read(table, id="number", text="body")[0] == [("row-1", "one"), ("row-4", "four")]
    with pytest.raises(DataError, match="has no column `text`"):
        read(table)
    table.write_bytes('\ufeffid;text\r\n1;"Grüße; an alle"\r\n'.encode())
    assert read(table) == ([("1", "Grüße; an alle")], [])
    pq.write_table(pa.table({"id": [3, 4], "text": ["one", None]}), parquet)
    assert read(parquet) == (
        [("3", "one")],
        [f"{parquet} row 2: `text` must be a string, but got None"],
    )


RUSSIAN = "Очень долго ждал"


@pytest.mark.parametrize(
    ("form", "encoding", "content", "said"),
    [
        # What the study gave is used, which no guess would find.
        ({"delimiter": "#", "encoding": "cp1251"}, "cp1251", f"id#text\na#{RUSSIAN}\n", None),
        ({"encoding": "utf-8"}, "utf-8-sig", f"id,text\na,{RUSSIAN}\n", None),
        # Another program wrote the new file.
        ({"delimiter": "#"}, "utf-8", f"id;text\na;{RUSSIAN}\n", "read with `;`"),
        ({"delimiter": ";", "encoding": "shift_jis"}, "utf-8", f"id,text\na,{RUSSIAN}\n", "read with `,`"),
        # An encoding that is given stays where the delimiter alone is another.
        ({"delimiter": ";", "encoding": "cp1251"}, "cp1251", f"id,text\na,{RUSSIAN}\n", "read with `,`"),
    ],
)
def test_a_csv_file_is_read_as_those_of_the_study_unless_it_is_written_otherwise(
    form: dict[str, str | None],
    encoding: str,
    content: str,
    said: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    path = tmp_path / "texts.csv"
    path.write_bytes(content.encode(encoding))
    examples, bad = read_examples(path, trained(form=form))
    assert [(example.id, example.text) for example in examples] == [("a", RUSSIAN)]
    assert not bad
    told = [message for message in caplog.messages if "data.csv" in message]
    assert told == ([f"{path}: {said}, not as `data.csv` says"] if said else [])


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl", "texts.csv", "texts.parquet"])
def test_files_that_are_none(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(DataError, match="no such file"):
        read(path)
    path.write_bytes(b"")
    messages = {".parquet": "must be a parquet file", ".csv": "the file is empty"}
    with pytest.raises(
        DataError, match=messages.get(path.suffix, "must hold at least one text, but is empty")
    ):
        read(path)


def test_pairs_come_in_jsonl_alone(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("id,text\n1,a b\n")
    with pytest.raises(DataError, match=r"texts\.csv: must be jsonl, .* `segments` with q and c as"):
        read_examples(tmp_path / "texts.csv", trained(("q", "c")))
