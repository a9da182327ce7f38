"""Cells in the form of a jsonl line. csv, jsonl, parquet and the hub read a cell in the same way.

    cell                        a class           several classes        a number     spans (not jsonl)
    null                        unlabelled        unlabelled             unlabelled   unlabelled
    empty or blank text         unlabelled        no class holds (1)     unlabelled   unlabelled
    `[]` as list or text        refused           no class holds         refused      no span
    a list as list or text      refused           its classes            refused      its spans
    NaN, infinity               refused           refused                refused      refused
    the text "NaN"              the class `NaN`   the class `NaN`        refused      refused
    the text "None", "NA" ...   a class           a class                refused      refused

(1) `data.csv.empty: unlabelled` makes it unlabelled; csv has no null, so its empty cells are empty text.
Several classes are a list, its text as in JSON, Python, NumPy or PostgreSQL, `a|b`, or columns of 0 and 1.
All numbers of a task in text have one mark of decimals. Spans are {name: [[start, end], ...]} or, for one
name, [[start, end], ...]; a table may hold them as JSON. Class names lose outer white space.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from hpo.config.data_config import ColumnsConfig, CsvConfig, TaskConfig
from hpo.data.tags import spans_of_tags
from hpo.errors import DataError, did_you_mean, shorten
from hpo.tasks.kind import KINDS
from hpo.tasks.number_text import NumberText, readings

TaskConfigs = Mapping[str, TaskConfig]
NO_CSV = CsvConfig(delimiter=",")


@dataclass(frozen=True)
class Row:
    """One raw row. A row with `problems` cannot be used."""

    where: str
    """File and line, or row."""
    row: object
    problems: Sequence[str] = ()
    span_tasks: frozenset[str] | None = None
    """Span tasks with a truth in this row; None: all, if it has spans."""
    tag_counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By task, the counts of `spans_of_tags`."""
    numbers: Sequence[NumberText] = ()


def read_labels(
    cells: Mapping[str, Any], tasks: TaskConfigs, csv: CsvConfig, problems: list[str]
) -> tuple[dict[str, Any], list[NumberText]]:
    """Return the labels of a row's cells by task, without the unlabelled ones, and the numbers in text."""
    labels: dict[str, Any] = {}
    numbers: list[NumberText] = []
    for task, cell in cells.items():
        kind = KINDS[tasks[task].kind] if task in tasks else None
        if kind is None:  # The check of rows knows the names of all tasks.
            labels[task] = cell
        elif _is_blank(cell):
            if kind.is_list and cell is not None and csv.empty == "none":
                labels[task] = []
        else:
            separator, comma = csv.list_separator or "|", csv.delimiter != ","
            try:
                labels[task] = kind.from_cell(cell, separator, has_decimal_comma=comma)
            except ValueError as error:
                problems.append(f"labels.{task}{error}")
            found = (
                readings(cell, has_decimal_comma=comma) if kind.is_number and isinstance(cell, str) else {}
            )
            if labels.get(task) in found.values():
                numbers.append((task, cell, found))
    return labels, numbers


def read_jsonl_row(row: Row, row_id: str, tasks: TaskConfigs) -> Row:
    """Return a row of jsonl with an id, and labels as `read_labels` gives them; the given row may change."""
    if isinstance(row.row, dict) and row.row.get("id") is None:
        row.row["id"] = row_id
    if not isinstance(row.row, dict) or not isinstance(row.row.get("labels"), dict):
        return row
    problems: list[str] = []
    row.row["labels"], numbers = read_labels(row.row["labels"], tasks, NO_CSV, problems)
    return Row(row.where, row.row, problems, numbers=numbers) if problems or numbers else row


def row_text(cells: Mapping[str, Any], columns: ColumnsConfig) -> dict[str, Any]:
    """Return the `text` of a row, and its `segments` if it is a pair, of which one may be empty or null.

    Raises ValueError if tokens or the texts of a pair are no text.
    """
    texts = [cells[name] for name in columns.texts]
    if not columns.tokens and len(texts) == 1:
        return {"text": texts[0]}
    parts = as_list(*texts) if columns.tokens else ["" if one is None else one for one in texts]
    if others := [one for one in parts if not isinstance(one, str)]:
        raise ValueError(f"`{'` and `'.join(columns.texts)}` must be text, but got {others[0]!r:.60}")
    if columns.tokens:
        return {"text": " ".join(parts)}
    text, begin = "\n".join(parts), len(parts[0]) + 1
    segments = dict(zip(columns.texts, ([0, begin - 1], [begin, len(text)]), strict=True))
    return {"text": text, "segments": segments}


class Table:
    """Bring the rows of a table into the form of a jsonl line.

    `class_names` are the classes of columns with numbers in their place. A table of texts to predict has
    `tasks=None`: it needs no column of ids, and `id` is its default name.
    """

    def __init__(
        self,
        name: str,
        split: str,
        columns: ColumnsConfig,
        tasks: TaskConfigs | None,
        class_names: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._split = split
        self._columns = columns
        self._class_names = class_names
        self._is_of_texts = tasks is None
        self._tasks = tasks or {}
        self._span_names = {
            task: config.span_names or ()
            for task, config in self._tasks.items()
            if KINDS[config.kind].in_spans
        }
        with_labels = [task for task in self._tasks if task not in self._span_names]
        in_spans = list(self._span_names)
        for key, known in (("labels", with_labels), ("spans", in_spans), ("tags", in_spans)):
            for task in getattr(columns, key):
                if task not in known:
                    hint = did_you_mean(task, known)
                    raise DataError(f"data.columns.{key}: no task with {key} is called `{task}`.{hint}")

    @property
    def names(self) -> list[str]:
        """Columns to read."""
        columns = self._columns
        labels = ([one] if isinstance(one, str) else one for one in columns.labels.values())
        names = (columns.id, *columns.texts, columns.group, *chain(*labels))
        names += (*columns.spans.values(), *columns.tags.values())
        return [name for name in dict.fromkeys(names) if name is not None]

    def check(self, header: Sequence[str]) -> None:
        """Raise DataError unless the header has each column to read once."""
        if self._is_of_texts:
            column = self._columns.id or "id"
            id_column = column if column in header else None
            self._columns = self._columns.model_copy(update={"id": id_column})
        for name in self.names:
            if name not in header:
                raise DataError(f"{self.name}: has no column `{name}`.{did_you_mean(name, header)}")
            same = [f"`{column}`" for column in header if column.strip() == name.strip()]
            if len(same) > 1:
                raise DataError(
                    f"{self.name}: must have the column `{name}` once, but has {', '.join(same)}. "
                    "Rename the others."
                )

    def row(self, where: str, number: int, cells: Mapping[str, Any], csv: CsvConfig = NO_CSV) -> Row:
        """Return the row of these cells, the `number`-th of its split."""
        try:
            text = row_text(cells, self._columns)
        except ValueError as error:
            return Row(where, None, [str(error)])
        problems: list[str] = []
        by_task = {}
        for task, column in self._columns.labels.items():
            try:
                if isinstance(column, str):
                    by_task[task] = class_of_number(cells[column], self._class_names.get(column))
                else:
                    by_task[task] = _classes_of_columns({name: cells[name] for name in column})
            except ValueError as error:
                problems.append(f"labels.{task}{error}")
        labels, numbers = read_labels(by_task, self._tasks, csv, problems)
        spans: dict[str, Any] = {}
        columns, tag_counts = self._columns.spans | self._columns.tags, dict[str, Mapping[str, int]]()
        annotated = set(self._span_names) if columns else set()
        for task, column in columns.items():
            value, names = cells[column], self._span_names[task]
            if _is_blank(value):
                annotated.discard(task)
                continue
            if task in self._columns.tags:
                try:
                    known = self._class_names.get(column, self._tasks[task].classes)
                    tags, tokens = as_list(value), as_list(cells[self._columns.texts[0]])
                    value, tag_counts[task] = spans_of_tags(tokens, class_of_number(tags, known), names)
                except ValueError as error:
                    problems.append(f"tags.{task}: {str(error).strip()}")
                    continue
            if isinstance(value, str):
                try:
                    value = json.loads(value, object_pairs_hook=unique_keys)
                except ValueError as error:
                    problems.append(f"column {column} must be JSON, as `[[0, 4]]`, but {error}")
                    continue
            if isinstance(value, Mapping):
                spans |= {key: pairs for key, pairs in value.items() if pairs}
            elif value and len(names) == 1:
                spans[names[0]] = value
            elif value:
                problems.append(
                    f"column {column} must be {{name: [[start, end], ...]}}: `{task}` has several span names"
                )
        row_id = f"{self._split}-{number}" if self._columns.id is None else cells[self._columns.id]
        row = {"id": row_id, **text, "labels": labels, "spans": spans}
        if self._columns.group is not None:
            row["group"] = cells[self._columns.group]
        return Row(where, row, problems, frozenset(annotated), tag_counts, numbers)


def as_list(cell: Any) -> list[Any]:
    """Return a list from a cell, in which it may be JSON. Raises ValueError."""
    value = cell
    with suppress(ValueError):  # no JSON, as a list that pandas wrote
        value = json.loads(cell) if isinstance(cell, str) else cell
    if not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"tokens and tags must be lists, in text as JSON, but got {shorten(repr(cell), 60)}")
    return [*value]


def unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a repeated key: Python would take its last value."""
    row = dict(items)
    for key in row if len(row) < len(items) else ():
        if [name for name, _ in items].count(key) > 1:
            raise ValueError(f"the key `{key}` must occur once in its object")
    return row


def class_names(features: Any) -> dict[str, list[str]]:
    """Return the classes of columns with numbers in their place, from the features of `datasets`."""
    names = {
        column: getattr(getattr(feature, "feature", feature), "names", None)
        for column, feature in (features or {}).items()
    }
    return {column: list(classes) for column, classes in names.items() if classes}


def class_of_number(cell: Any, names: Sequence[str] | None) -> Any:
    """Return the class of a number in a data set of the hub, and None for -1.

    Raises ValueError for a cell that is neither a number nor a name of a class.
    """
    if names is None or _is_blank(cell) or cell in names:
        return cell
    if isinstance(cell, list):
        return [class_of_number(one, names) for one in cell]
    try:
        number = float(cell)  # pandas writes 1.0 to csv if the column has an empty cell
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(cell, str) and cell.strip() in names:
        return cell
    if number == -1:
        return None
    if number not in range(len(names)):
        got = f"{shorten(repr(cell), 60)}.{did_you_mean(str(cell), names)}"
        raise ValueError(f" must be a class of the data set, but got {got}")
    return names[int(number)]


def _classes_of_columns(cells: Mapping[str, Any]) -> list[str] | None:
    """Return the columns with a 1, or None if all are blank. Raises ValueError for a cell beside 0 and 1."""
    held = {name: str(cell).strip().lower().removesuffix(".0") for name, cell in cells.items()}
    if wrong := [name for name in held if held[name] not in ("0", "1", "false", "true")]:
        if all(map(_is_blank, cells.values())):
            return None
        raise ValueError(f": column {wrong[0]} must be 0 or 1, but got {shorten(repr(cells[wrong[0]]), 60)}")
    return [name for name in held if held[name] in ("1", "true")]


def _is_blank(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())
