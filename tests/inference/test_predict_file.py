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
from hpo.inference.predict_file import predicted_row, read_examples, write_predictions
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


def read(path: Path, columns: dict[str, str] | None = None, **settings: Any) -> tuple[Any, list[str]]:
    """Read the ids and texts, and the problems, as a model with these columns and settings does."""
    settings["windowing"] = Windowing(16, pair_segments=settings.pop("pair", None))
    export = ExportSettings(attention="sdpa", precision="fp32", columns=columns or {}, **settings)
    model = TrainedModel(make_model(), load_tokenizer("minilm"), export)
    examples, problems = read_examples(path, model)
    return [(example.id, example.text) for example in examples], [": ".join(one) for one in problems]


def test_predicted_row_is_a_data_row() -> None:
    row = predicted_row(EXAMPLE, PREDICTION)
    assert row == ROW
    tasks = [task for task in KIND_TASKS if task.name != "joint"]  # its spans must not overlap
    example, problems = RowChecker(tasks, None, {}).check({k: v for k, v in row.items() if k != "scores"})
    assert not problems
    assert example is not None
    assert example.labels == ROW["labels"]
    paired = Example("1", "a b", {}, {}, {"q": (0, 1)})
    assert predicted_row(paired, {})["segments"] == {"q": [0, 1]}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_written_predictions(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.{suffix}"
    write_predictions(path, [[ROW], [{**ROW, "id": "2"}]], KIND_TASKS)
    assert read(path) == ([("1", ROW["text"]), ("2", ROW["text"])], [])
    if suffix == "jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == [ROW, {**ROW, "id": "2"}]
        return
    if suffix == "csv":
        with path.open(encoding="utf-8", newline="") as file:
            row, _ = csv.DictReader(file)
        row |= {key: json.loads(value) for key, value in row.items() if value and value[0] in "[{0123456789"}
    else:
        row, _ = pq.read_table(path).to_pylist()
    assert (row["labels.single"], row["labels.number"], row["labels.multi"]) == ("b", 1.5, ["a"])
    assert row["scores.single"] == ROW["scores"]["single"]
    overlapping = {name: spans for name, spans in row["spans.overlapping"].items() if spans}
    assert overlapping == {"x": [[0, 4]], "y": [[5, 7]]}
    assert "scores.number" not in row


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyboardInterrupt("stop"), "stop"), (OSError(28, "No space left"), "csv: cannot be written: No space")],
)
def test_failed_write_keeps_the_old_file(tmp_path: Path, error: BaseException, said: str) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")

    def fail() -> Iterator[dict[str, Any]]:
        yield ROW
        raise error

    with pytest.raises((KeyboardInterrupt, InputError), match=said):
        write_predictions(path, [fail()], KIND_TASKS)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("out.csv", "old")]


def test_read_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("\ufeffZoë is in\r\n\n  two words \n".encode() + b"\xff\nlast\n\n \n")
    texts, bad = read(path)
    assert texts == [("row-1", "Zoë is in"), ("row-3", "  two words "), ("row-5", "last")]
    assert bad[0] == f"{path}:2: `text` is empty"
    assert bad[1].startswith(f"{path}:4: must be UTF-8, but ")
    path.write_text("")
    with pytest.raises(DataError, match="must hold at least one text, but is empty"):
        read(path)


def test_read_rows_ignores_labels_and_lists_bad_ones(tmp_path: Path) -> None:
    path, table, parquet = (tmp_path / f"texts.{suffix}" for suffix in ("jsonl", "csv", "parquet"))
    path.write_text('{"id": 7, "text": "two", "labels": {"new": 1}, "spans": 3}\n{"text": \n{"text": "x"}')
    texts, bad = read(path)
    assert texts == [("7", "two"), ("row-3", "x")]
    assert [line.split(": ")[0] for line in bad] == [f"{path}:2"]
    table.write_text("key,body\nk1,one\nk2\nk3,\nk4,four\n")
    texts, bad = read(table, {"id": "key", "text": "body"})
    assert texts == [("k1", "one"), ("k4", "four")]
    assert bad[0].startswith(f"{table}:3: must have 2 cells as the header has, but got 1")
    assert bad[1] == f"{table}:4: `text` is empty"
    with pytest.raises(DataError, match="has no column `text`"):
        read(table)
    with pytest.raises(DataError, match="has no column `q`"):
        read(table, pair=("q", "c"))
    pq.write_table(pa.table({"id": [3, 4], "text": ["one", None]}), parquet)
    assert read(parquet) == ([("3", "one")], [f"{parquet} row 2: `text` must be a string, but got None"])


def test_pairs_and_tokens_of_every_file(tmp_path: Path) -> None:
    table, lines, parquet, conll = (
        tmp_path / f"texts.{suffix}" for suffix in ("csv", "jsonl", "parquet", "conll")
    )
    table.write_text("q,c\nwho,Ann\nwhy,\n,\n")
    lines.write_text(
        '{"q": "who", "c": "Ann"}\n{"text": "why ", "segments": {"q": [0, 3], "c": [4, 4]}}\n{"q": "x"}\n'
    )
    pq.write_table(pa.table({"q": ["who", "why", None], "c": ["Ann", None, None]}), parquet)
    for path, last in ((table, "why\n"), (lines, "why "), (parquet, "why\n")):
        texts, bad = read(path, pair=("q", "c"))
        assert texts == [("row-1", "who\nAnn"), ("row-2", last)]
        assert len(bad) == 1
    conll.write_text("Ann PER\nran O\n\nSo O\n")
    assert read(conll, {"tokens": "0"}) == ([("row-1", "Ann ran"), ("row-2", "So")], [])
    lines.write_text('{"words": ["Ann", "ran"]}\n{"text": "So"}\n')
    assert read(lines, {"tokens": "words"}) == ([("row-1", "Ann ran"), ("row-2", "So")], [])
    write_predictions(
        table, [[{"id": "1", "text": "a\nb", "segments": {"q": [0, 1], "c": [2, 3]}}]], [], ("q", "c")
    )
    assert table.read_text() == "id,q,c\n1,a,b\n"


def test_csv_form_is_the_study_s_or_guessed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hpo.data")
    path, text = tmp_path / "texts.csv", "Очень долго ждал"
    # The study's settings, which no guess would find; then a file with another delimiter.
    for delimiter, content in (("#", f"id#text\na#{text}\n"), (";", f"id,text\na,{text}\n")):
        path.write_bytes(content.encode("cp1251"))
        assert read(path, csv={"delimiter": delimiter, "encoding": "cp1251"}) == ([("a", text)], [])
    notes = [message for message in caplog.messages if "data.csv" in message]
    assert notes == [f"{path}: read with `,`, not as `data.csv` says"]
