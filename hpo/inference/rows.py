"""Files of texts to predict, and files of predictions.

A predicted row has the form of a data row (`id`, `text`, `segments`, `labels`, `spans`) plus
`scores: {task: {class: probability}}`, so it can be read as data again. In a table each task has a column of
its own: `labels.<task>`, `spans.<task>`, `scores.<task>`.

A file is written under another name and renamed when it is whole: it is there whole or not at all.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hpo.config.data_config import ColumnsConfig, CsvConfig
from hpo.data.sources import JSON_LINES, nearest_file, text_rows
from hpo.errors import DataError, InputError
from hpo.inference.model import Prediction, TrainedModel
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task

Row = dict[str, Any]
Columns = dict[str, Task]
"""What a table has beside id and text: columns, and the task of each."""
WriteRows = Callable[[Iterable[Row]], None]


def read_examples(path: Path, model: TrainedModel) -> tuple[list[Example], list[tuple[str, str]]]:
    """The texts of a file that `model` can predict, and what is wrong with each other row, with its line.

    Raises DataError where the file as a whole cannot be read, or holds no row at all.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file.{nearest_file(path)}")
    if (pair := model.settings.windowing.pair_segments) and path.suffix.lower() not in JSON_LINES:
        raise DataError(
            f"{path}: must be jsonl, since the model takes a pair of segments of each text: `segments` with "
            f"{' and '.join(pair)} as {{name: [start, end]}}."
        )
    given = {key: model.settings.columns.get(key) for key in ("id", "text")}
    columns = ColumnsConfig.model_validate({key: of for key, of in given.items() if of})
    examples: list[Example] = []
    bad: list[tuple[str, str]] = []
    rows = text_rows(path, columns, CsvConfig.model_validate(model.settings.csv))
    for number, row in enumerate(rows, start=1):
        example, problems = (
            (None, list(row.problems)) if row.problems else model.example(row.row, f"row-{number}")
        )
        if example is None:
            bad.append((row.where, "; ".join(problems)))
        else:
            examples.append(example)
    if not examples and not bad:
        raise DataError(f"{path}: must hold at least one text, but is empty.")
    return examples, bad


def predicted_row(example: Example, prediction: Prediction) -> Row:
    """One prediction in the form of a data row.

    Spans are those of all tasks under their names. Where two tasks have a name in common, its spans are those
    of either, each once.
    """
    row: Row = {"id": example.id, "text": example.text}
    if example.segments:
        row["segments"] = {name: list(span) for name, span in example.segments.items()}
    row["labels"] = {name: of.label for name, of in prediction.items() if of.label is not None}
    spans: dict[str, set[tuple[int, int]]] = {}
    for of in prediction.values():
        for span in of.spans:
            spans.setdefault(span.name, set()).add((span.start, span.end))
    row["spans"] = {name: [list(span) for span in sorted(of_name)] for name, of_name in spans.items()}
    row["scores"] = {name: of.scores for name, of in prediction.items() if of.scores}
    return row


def check_output(path: Path) -> None:
    """Raise InputError where a file of predictions cannot be written to `path`."""
    if path.suffix.lower() not in _WRITERS:
        known = ", ".join(_WRITERS)
        raise InputError(f"{path}: an output must end in {known}, which says its format.")
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = f"{path} is a folder" if path.is_dir() else f"{folder} is no folder that may be written"
        raise InputError(f"{path}: predictions need a file that may be made, but {what}.")


@contextmanager
def predictions_file(path: Path, tasks: Sequence[Task]) -> Iterator[WriteRows]:
    """What writes predicted rows to a file, by its suffix; without an error in the block it appears then.

    Raises InputError where it cannot be written.
    """
    check_output(path)
    columns = _columns(tasks)
    unfinished = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        try:
            with unfinished.open("wb") as file, _WRITERS[path.suffix.lower()](file, columns) as write:
                yield write
            unfinished.replace(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def json_line(row: Row) -> str:
    """A predicted row as a line of jsonl."""
    return json.dumps(row, ensure_ascii=False)


def _cells(row: Row, columns: Columns) -> Row:
    """A predicted row as cells, in the order of the columns."""
    cells: Row = {"id": row["id"], "text": row["text"]}
    for column, task in columns.items():
        if KINDS[task.kind].in_spans:
            cells[column] = {name: row["spans"][name] for name in task.labels if name in row["spans"]}
        else:
            cells[column] = row[column.partition(".")[0]][task.name]
    return cells


@contextmanager
def _jsonl(file: IO[bytes], _columns: Columns) -> Iterator[WriteRows]:
    yield lambda rows: file.writelines(f"{json_line(row)}\n".encode() for row in rows)


@contextmanager
def _csv(file: IO[bytes], columns: Columns) -> Iterator[WriteRows]:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, ["id", "text", *columns])
    writer.writeheader()

    def cell(value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value

    def write(rows: Iterable[Row]) -> None:
        writer.writerows({key: cell(value) for key, value in _cells(row, columns).items()} for row in rows)

    yield write
    text.detach()


@contextmanager
def _parquet(file: IO[bytes], columns: Columns) -> Iterator[WriteRows]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    spans = pa.list_(pa.list_(pa.int64(), 2))
    types: dict[str, Any] = {"id": pa.string(), "text": pa.string()}
    for column, task in columns.items():
        kind = column.partition(".")[0]
        if kind != "scores" and not KINDS[task.kind].in_spans:
            label = pa.float64() if KINDS[task.kind].is_number else pa.string()
            types[column] = pa.list_(label) if KINDS[task.kind].is_list else label
        else:
            of_name = pa.float64() if kind == "scores" else spans
            types[column] = pa.struct([(name, of_name) for name in task.labels])
    schema = pa.schema(list(types.items()))
    with pq.ParquetWriter(file, schema) as writer:
        yield lambda rows: writer.write_table(
            pa.Table.from_pylist([_cells(row, columns) for row in rows], schema=schema)
        )


_WRITERS = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}


def _columns(tasks: Sequence[Task]) -> Columns:
    columns: Columns = {}
    for task in tasks:
        kind = KINDS[task.kind]
        parts = ("spans",) if kind.in_spans else ("labels", "scores") if kind.has_classes else ("labels",)
        columns |= {f"{part}.{task.name}": task for part in parts}
    return columns
