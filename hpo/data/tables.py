"""The cells of a table's row (csv, parquet, hub) in the form of a jsonl line.

Several classes are a list, a JSON list, or `a|b`. Spans are {name: [[start, end], ...]}, or for a single span
name [[start, end], ...]. An empty cell means "not annotated". For several classes in csv it means that no
class holds, unless `data.csv.empty` is `unlabelled`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.config.data_config import ColumnsConfig, CsvConfig, TaskConfig
from hpo.errors import DataError, did_you_mean
from hpo.tasks.registry import KINDS

TaskConfigs = Mapping[str, TaskConfig]
_NO_CSV = CsvConfig(delimiter=",", empty="unlabelled")


@dataclass(frozen=True)
class Row:
    """One row as it was read; `problems` say why `row` cannot be used."""

    where: str
    """File and line, or row."""
    row: object
    problems: Sequence[str] = ()
    span_tasks: frozenset[str] | None = None
    """The span tasks that the row is annotated for; None: all, if it has spans."""


def column_names(columns: ColumnsConfig) -> list[str]:
    names = (columns.id, columns.text, *columns.labels.values(), *columns.spans.values())
    return [name for name in dict.fromkeys(names) if name is not None]


class Table:
    """Turns the cells of a table's row into the form of a jsonl line; `csv` says what cells of text mean."""

    def __init__(
        self,
        name: str,
        split: str,
        columns: ColumnsConfig,
        tasks: TaskConfigs,
        csv: CsvConfig = _NO_CSV,
    ) -> None:
        self.name = name
        self._csv = csv
        self._split = split
        self._columns = columns
        self._tasks = tasks
        self._span_names = {
            task: config.span_names or () for task, config in tasks.items() if KINDS[config.kind].in_spans
        }
        with_labels = [task for task in tasks if task not in self._span_names]
        for key, known in (("labels", with_labels), ("spans", list(self._span_names))):
            for task in getattr(columns, key):
                if task not in known:
                    hint = did_you_mean(task, known)
                    raise DataError(f"data.columns.{key}: no task with {key} is called `{task}`.{hint}")
        self.names = column_names(columns)

    def check(self, header: Sequence[str]) -> None:
        """Raises DataError unless each column that is read is in the table's header once."""
        for name in self.names:
            if name not in header:
                raise DataError(f"{self.name}: has no column `{name}`.{did_you_mean(name, header)}")
            if (num := header.count(name)) > 1:
                raise DataError(
                    f"{self.name}: must have the column `{name}` once, but has it {num} times. "
                    "Rename the others."
                )

    def row(self, where: str, number: int, cells: Mapping[str, Any]) -> Row:
        problems: list[str] = []
        labels: dict[str, Any] = {}
        for task, column in self._columns.labels.items():
            if not _is_empty(cells[column]):
                labels[task] = self._label(task, cells[column], column, problems)
            elif KINDS[self._tasks[task].kind].is_list and self._csv.empty == "none":
                labels[task] = []
        spans: dict[str, Any] = {}
        annotated = set(self._span_names) if self._columns.spans else set()
        for task, column in self._columns.spans.items():
            value, names = cells[column], self._span_names[task]
            if _is_empty(value):
                annotated.discard(task)
                continue
            if isinstance(value, str):
                value = _parsed(value, column, problems)
            if isinstance(value, Mapping):
                spans |= {key: pairs for key, pairs in value.items() if pairs}
            elif value and len(names) == 1:
                spans[names[0]] = value
            elif value:
                problems.append(
                    f"column {column} must be {{name: [[start, end], ...]}}: `{task}` has several span names"
                )
        row_id = f"{self._split}-{number}" if self._columns.id is None else cells[self._columns.id]
        row = {"id": row_id, "text": cells[self._columns.text], "labels": labels, "spans": spans}
        return Row(where, row, problems, frozenset(annotated))

    def _label(self, task: str, cell: Any, column: str, problems: list[str]) -> Any:
        read = KINDS[self._tasks[task].kind].from_cell
        return _parsed(cell, column, problems, lambda text: read(text, self._csv))


class TextTable(Table):
    """A table of texts alone: ids are in the column that is named, or else in `id`, where there is one."""

    def check(self, header: Sequence[str]) -> None:
        column = self._columns.id or "id"
        id_column = column if column in header else None
        self._columns = self._columns.model_copy(update={"id": id_column})
        self.names = column_names(self._columns)
        super().check(header)


def _is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _parsed(cell: Any, column: str, problems: list[str], read: Callable[[Any], Any] = json.loads) -> Any:
    try:
        return read(cell)
    except ValueError as error:  # JSONDecodeError, or a number of too many digits
        problems.append(f'column {column} must be JSON in double quotes, as `["a", "b"]`, but {error}')
        return None
