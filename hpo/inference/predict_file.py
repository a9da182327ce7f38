"""Predictions for a file of texts (`hpo predict`).

A predicted row is a data row (`id`, `text`, `segments`, `labels`, `spans`) plus
`scores: {task: {class: probability}}`, so it can be read as data again. A table has a column for each task:
`labels.<task>`, `spans.<task>`, `scores.<task>`.
"""

import csv
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from hpo.config.data_config import ColumnsConfig, CsvConfig
from hpo.data.examples import problem_list
from hpo.data.sources import JSON_LINES, bare_suffix, nearest_file, text_rows
from hpo.device import limit_threads, probe_device
from hpo.errors import DataError, InputError
from hpo.inference.model import Prediction, TrainedModel
from hpo.memory import disable_malloc_trim
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task

_logger = logging.getLogger("hpo.inference")

Row = dict[str, Any]
Columns = dict[str, Task]
"""The task of each column beside id and text."""
Chunks = Iterable[Iterable[Row]]


@dataclass
class FilePredictions:
    """Predictions for a file. Without an `output`, reading `rows` makes them."""

    num_predictions: int
    left_out: list[str]
    """Unreadable rows, with line and problem."""
    rows: Iterator[list[Row]]
    output: Path | None

    def as_json(self) -> dict[str, Any]:
        content = {"num_predictions": self.num_predictions, "left_out": self.left_out}
        if self.output is not None:
            return content | {"output": str(self.output)}
        return content | {"predictions": [row for rows in self.rows for row in rows]}

    def lines(self) -> Iterator[str]:
        """Yield the predictions as JSON, several lines at a time."""
        yield from ("\n".join(map(json_line, rows)) for rows in self.rows)


def predict_file(
    model: TrainedModel, file: Path, output: Path | None = None, *, skip_bad_rows: bool = False
) -> FilePredictions:
    """Predict the texts of `file`, into `output` if it is given.

    Raises DataError for an unreadable row without `skip_bad_rows`, InputError if `output` cannot be written.
    """
    if output is not None:
        check_output(output)
    examples, bad = read_examples(file, model)
    if bad and not (skip_bad_rows and examples):
        num = "1 row" if len(bad) == 1 else f"{len(bad):,} rows"
        hint = " or --skip-bad-rows" if examples else ""
        raise DataError(f"{num} of {file} cannot be read; mend{hint}:{problem_list(bad)}")
    if bad:
        _logger.info("%d of %d rows are left out:%s", len(bad), len(bad) + len(examples), problem_list(bad))
    if model.device.type == "cpu":
        limit_threads(probe_device("cpu"))
        disable_malloc_trim()
    _logger.info("predicting %d texts", len(examples))
    rows = _predicted_rows(model, examples)
    if output is not None:
        write_predictions(output, rows, model.tasks)
        _logger.info("%d predictions are in %s.", len(examples), output)
    return FilePredictions(len(examples), [": ".join(one) for one in bad], rows, output)


def _predicted_rows(model: TrainedModel, examples: list[Example]) -> Iterator[list[Row]]:
    remaining = iter(examples)
    for chunk in model.predict_examples(examples):
        yield [predicted_row(next(remaining), prediction) for prediction in chunk]


def read_examples(path: Path, model: TrainedModel) -> tuple[list[Example], list[tuple[str, str]]]:
    """Read the texts of a file. Returns the examples, and (line, problem) of each unreadable row.

    Raises DataError if the file as a whole cannot be read, or has no row.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file.{nearest_file(path)}")
    if (pair := model.settings.windowing.pair_segments) and bare_suffix(path) not in JSON_LINES:
        raise DataError(
            f"{path}: must be jsonl, since the model takes a pair of segments of each text: `segments` with "
            f"{' and '.join(pair)} as {{name: [start, end]}}."
        )
    names = {key: model.settings.columns.get(key) for key in ("id", "text")}
    columns = ColumnsConfig.model_validate({key: name for key, name in names.items() if name})
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
    """Return a prediction as a data row. Equal spans of two tasks with a name in common appear once."""
    row: Row = {"id": example.id, "text": example.text}
    if example.segments:
        row["segments"] = {name: list(span) for name, span in example.segments.items()}
    row["labels"] = {task: one.label for task, one in prediction.items() if one.label is not None}
    spans: dict[str, set[tuple[int, int]]] = {}
    for one in prediction.values():
        for span in one.spans:
            spans.setdefault(span.name, set()).add((span.start, span.end))
    row["spans"] = {name: [list(ends) for ends in sorted(pairs)] for name, pairs in spans.items()}
    row["scores"] = {task: one.scores for task, one in prediction.items() if one.scores}
    return row


def check_output(path: Path) -> None:
    """Raise InputError if predictions cannot be written to `path`."""
    if path.suffix.lower() not in _WRITERS:
        known = ", ".join(_WRITERS)
        raise InputError(f"{path}: an output must end in {known}, which says its format.")
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = f"{path} is a folder" if path.is_dir() else f"{folder} is no folder that may be written"
        raise InputError(f"{path}: predictions need a file that may be made, but {what}.")


def write_predictions(path: Path, chunks: Chunks, tasks: Sequence[Task]) -> None:
    """Write predicted rows in the format of the file's suffix; the file appears when it is whole.

    Raises InputError if it cannot be written.
    """
    check_output(path)
    unfinished = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            _WRITERS[path.suffix.lower()](file, chunks, _columns(tasks))
        unfinished.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def json_line(value: Any) -> str:
    """Format a predicted row, or a cell of it, as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _cells(row: Row, columns: Columns) -> Row:
    """Return the cells of a predicted row, in the order of the columns."""
    cells: Row = {"id": row["id"], "text": row["text"]}
    for column, task in columns.items():
        if KINDS[task.kind].in_spans:
            cells[column] = {name: row["spans"][name] for name in task.labels if name in row["spans"]}
        else:
            cells[column] = row[column.partition(".")[0]][task.name]
    return cells


def _jsonl(file: IO[bytes], chunks: Chunks, _columns: Columns) -> None:
    for rows in chunks:
        file.writelines(f"{json_line(row)}\n".encode() for row in rows)


def _csv(file: IO[bytes], chunks: Chunks, columns: Columns) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, ["id", "text", *columns])
    writer.writeheader()
    for row in chain.from_iterable(chunks):
        cells = _cells(row, columns).items()
        writer.writerow({key: json_line(of) if isinstance(of, list | dict) else of for key, of in cells})
    text.detach()


def _parquet(file: IO[bytes], chunks: Chunks, columns: Columns) -> None:
    spans = pa.list_(pa.list_(pa.int64(), 2))
    types: dict[str, Any] = {"id": pa.string(), "text": pa.string()}
    for column, task in columns.items():
        kind = column.partition(".")[0]
        if kind != "scores" and not KINDS[task.kind].in_spans:
            label = pa.float64() if KINDS[task.kind].is_number else pa.string()
            types[column] = pa.list_(label) if KINDS[task.kind].is_list else label
        else:
            value = pa.float64() if kind == "scores" else spans
            types[column] = pa.struct([(name, value) for name in task.labels])
    schema = pa.schema(list(types.items()))
    with pq.ParquetWriter(file, schema) as writer:
        for rows in chunks:
            writer.write_table(pa.Table.from_pylist([_cells(row, columns) for row in rows], schema=schema))


_WRITERS = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}


def _columns(tasks: Sequence[Task]) -> Columns:
    columns: Columns = {}
    for task in tasks:
        kind = KINDS[task.kind]
        parts = ("spans",) if kind.in_spans else ("labels", "scores") if kind.has_classes else ("labels",)
        columns |= {f"{part}.{task.name}": task for part in parts}
    return columns
