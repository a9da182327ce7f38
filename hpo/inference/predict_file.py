"""Predictions for a file of texts (`hpo predict`).

A predicted row is a data row (`id`, `text`, `segments`, `labels`, `spans`) plus
`scores: {task: {class: probability}}`, so it can be read as data again. A table has a column for each task:
`labels.<task>`, `spans.<task>`, `scores.<task>`, with lists and mappings as JSON.

A file is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from hpo.config.data_config import ColumnsConfig, CsvConfig
from hpo.data.examples import problem_list
from hpo.data.sources import JSON_LINES, nearest_file, text_rows
from hpo.device import limit_threads, probe_device
from hpo.errors import DataError, InputError
from hpo.inference.model import Prediction, TrainedModel
from hpo.memory import disable_malloc_trim
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task

_logger = logging.getLogger("hpo.inference")

Row = dict[str, Any]
OUTPUTS = (".jsonl", ".csv", ".parquet")


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
    """Predict the texts of `file`, into `output` if it is given."""
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
        write_predictions(output, chain.from_iterable(rows), model.tasks)
        _logger.info("%d predictions are in %s.", len(examples), output)
    return FilePredictions(len(examples), [": ".join(one) for one in bad], rows, output)


def _predicted_rows(model: TrainedModel, examples: list[Example]) -> Iterator[list[Row]]:
    remaining = iter(examples)
    for chunk in model.predict_examples(examples):
        yield [predicted_row(next(remaining), prediction) for prediction in chunk]


def read_examples(path: Path, model: TrainedModel) -> tuple[list[Example], list[tuple[str, str]]]:
    """Read the texts of a file. Returns the examples, and (line, problem) of each unreadable row."""
    if not path.is_file():
        raise DataError(f"{path}: no such file.{nearest_file(path)}")
    if (pair := model.settings.windowing.pair_segments) and path.suffix.lower() not in JSON_LINES:
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
    if path.suffix.lower() not in OUTPUTS:
        raise InputError(f"{path}: an output must end in {', '.join(OUTPUTS)}, which says its format.")
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = f"{path} is a folder" if path.is_dir() else f"{folder} is no folder that may be written"
        raise InputError(f"{path}: predictions need a file that may be made, but {what}.")


def write_predictions(path: Path, rows: Iterable[Row], tasks: Sequence[Task]) -> None:
    """Write predicted rows in the format of the file's suffix. Raises InputError if that is impossible."""
    check_output(path)
    unfinished = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        if path.suffix.lower() == ".jsonl":
            with unfinished.open("w", encoding="utf-8") as file:
                file.writelines(f"{json_line(row)}\n" for row in rows)
        else:
            table = pd.DataFrame([_cells(row, tasks) for row in rows])
            if path.suffix.lower() == ".csv":
                table.to_csv(unfinished, index=False, lineterminator="\r\n")
            else:
                table.to_parquet(unfinished, index=False)
        unfinished.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def json_line(row: Row) -> str:
    """Format a predicted row as a line of jsonl."""
    return json.dumps(row, ensure_ascii=False)


def _cells(row: Row, tasks: Sequence[Task]) -> Row:
    """Return the cells of a predicted row, with lists and mappings as JSON."""
    cells: Row = {"id": row["id"], "text": row["text"]}
    for task in tasks:
        kind, name = KINDS[task.kind], task.name
        if kind.in_spans:
            cells[f"spans.{name}"] = {key: row["spans"][key] for key in task.labels if key in row["spans"]}
        else:
            cells[f"labels.{name}"] = row["labels"][name]
            cells |= {f"scores.{name}": row["scores"][name]} if kind.has_classes else {}
    return {
        column: json.dumps(cell, ensure_ascii=False) if isinstance(cell, list | dict) else cell
        for column, cell in cells.items()
    }
