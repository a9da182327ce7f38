"""Rows of a data set as its files have them, each brought into the form of a jsonl line.

Without a column of ids, the split and the row's number are the id. A row that cannot be read is no error
here: it is a row with problems, reported with all others.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpo.code import errors_of_code
from hpo.config.allowed import DATA_DIR
from hpo.config.data_config import ColumnsConfig, CsvConfig, SourceConfig
from hpo.data.csv_files import csv_records, found_form, refuse_other_formats, shown
from hpo.data.tables import Row, Table, TaskConfigs, TextTable, read_jsonl_row, unique_keys
from hpo.errors import DataError, did_you_mean, shorten
from hpo.extensions import SOURCES

_logger = logging.getLogger("hpo.data")

SPLITS = ("train", "validation", "test")
JSON_LINES = (".jsonl", ".ndjson")
_NO_JSONL = {
    b"\xff\xfe": "UTF-16, but must be UTF-8. Save it as UTF-8",
    b"\xfe\xff": "UTF-16, but must be UTF-8. Save it as UTF-8",
    b"[": "a JSON array, but must have one JSON object a line. `jq -c '.[]'` writes it so",
}


@dataclass(frozen=True)
class Reader:
    """The rows of one split, read anew with every call of `rows`."""

    name: str
    rows: Callable[[], Iterator[Row]]


def located(config: SourceConfig) -> SourceConfig:
    """`config` with the paths of its data on this machine.

    Data that are not at their path are looked for in HPO_DATA_DIR by the last parts of the path, the longest
    end first: /home/a/sets/sgd in /data as /data/home/a/sets/sgd, then /data/a/sets/sgd, and so on.
    """
    given = config.files
    files = {split: path and _located(path) for split, path in given}
    changes: dict[str, Any] = {
        "path": config.path and _located(config.path),
        "files": given.model_copy(update=files),
        "tasks": _located(config.tasks) if isinstance(config.tasks, Path) else config.tasks,
    }
    if config.hub is not None and config.hub.name.startswith("/"):
        changes["hub"] = config.hub.model_copy(update={"name": str(_located(Path(config.hub.name)))})
    return config.model_copy(update=changes)


def _located(path: Path) -> Path:
    here = path if path.exists() else next((other for other in _elsewhere(path) if other.exists()), path)
    if here != path:
        _logger.info("%s is not here; the data are read from %s", path, here)
    return here


def _elsewhere(path: Path) -> list[Path]:
    if not (root := os.environ.get(DATA_DIR)):
        return []
    parts = Path(os.path.normpath(path)).parts[1:]
    return [Path(root, *parts[first:]) for first in range(len(parts))]


def split_readers(config: SourceConfig, tasks: TaskConfigs) -> dict[str, Reader]:
    if config.source in SOURCES:
        return _own_readers(config, tasks)
    return _file_readers(config, tasks) if config.hub is None else _hub_readers(config, tasks)


def _own_readers(config: SourceConfig, tasks: TaskConfigs) -> dict[str, Reader]:
    assert config.source is not None  # SourceConfig has seen to it.
    own = SOURCES[config.source]
    options, readers = own.options.model_validate(config.options), {}
    for split in SPLITS:
        with errors_of_code():
            rows = list(own.make(split, options) or ())
        if rows or split == "train":
            name = f"{config.source} {split}"
            readers[split] = Reader(name, partial(_own_rows, rows, name, tasks))
    return readers


def _own_rows(rows: list[Any], name: str, tasks: TaskConfigs) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        where = f"{name} row {number}"
        try:
            plain = json.loads(json.dumps(row))
        except (TypeError, ValueError) as error:
            yield Row(where, None, [f"must be what JSON can hold, but {error}"])
        else:
            named = {"id": f"{name.rpartition(' ')[2]}-{number}"}
            with_id = {**named, **plain} if isinstance(plain, dict) else plain
            yield read_jsonl_row(Row(where, with_id), tasks)


def _file_readers(config: SourceConfig, tasks: TaskConfigs) -> dict[str, Reader]:
    readers: dict[str, Reader] = {}
    for split in SPLITS:
        given = getattr(config.files, split)
        path = given or (config.path and config.path / f"{split}.{config.source}")
        if path is None or not (given or path.exists() or split == "train"):
            continue
        if not path.is_file():
            raise DataError(f"{path}: no such file; the {split} split must be there.{nearest_file(path)}")
        if config.source == "jsonl":
            readers[split] = Reader(str(path), partial(_labelled_rows, path, tasks))
        else:
            table = Table(str(path), split, config.columns, tasks)
            readers[split] = _table_reader(config.source == "csv", [path], config.csv, table)
    return readers


def text_rows(path: Path, columns: ColumnsConfig, csv: CsvConfig) -> Iterator[Row]:
    """The rows of a file of texts to predict: jsonl, csv or parquet by its suffix, else lines of text.

    Of a table, the column of ids may be missing. `csv` is how the study's files are written, which this one
    need not be. Raises DataError where the file cannot be read.
    """
    try:
        match path.suffix.lower():
            case suffix if suffix in JSON_LINES:
                yield from _jsonl_rows(path)
            case ".csv":
                form = found_form(path, csv, [columns.text])
                yield from _csv_rows({path: form}, TextTable(str(path), "row", columns, {}))
            case ".parquet":
                yield from _parquet_rows([path], TextTable(str(path), "row", columns, {}))
            case _:
                yield from _lines(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from None


def _lines(path: Path) -> Iterator[Row]:
    """A row for each line, but for blank ones at the end."""
    refuse_other_formats(path)
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            yield Row(f"{path}:{number}", {"id": f"row-{number}", "text": line.decode()})
        except UnicodeDecodeError as error:
            yield Row(f"{path}:{number}", None, [f"must be UTF-8, but {error}"])


def nearest_file(path: Path) -> str:
    """Say which file of the folder was probably meant."""
    if not (folder := path.parent).is_dir():
        root = os.environ.get(DATA_DIR)
        where = f", nor is it in {DATA_DIR} ({root}), as {folder.name} or with more of its path."
        hint = f". If {folder.name} lies elsewhere on this machine, name its folder in {DATA_DIR}."
        return f" There is no folder {folder}{where if root else hint}"
    names = sorted(item.name for item in path.parent.iterdir() if item.is_file())
    return did_you_mean(path.name, names[:50]) if names else f" {path.parent} is empty."


def _labelled_rows(path: Path, tasks: TaskConfigs) -> Iterator[Row]:
    return (read_jsonl_row(row, tasks) for row in _jsonl_rows(path))


def _jsonl_rows(path: Path) -> Iterator[Row]:
    refuse_other_formats(path, _NO_JSONL)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield Row(f"{path}:{number}", json.loads(line, object_pairs_hook=unique_keys))
            except (ValueError, RecursionError) as error:
                yield Row(f"{path}:{number}", None, [f"must be one JSON object in UTF-8, but {error}"])


def _table_reader(is_csv: bool, paths: Sequence[Path], csv: CsvConfig, table: Table) -> Reader:
    """Return the reader of csv files, or else of parquet files."""
    if not is_csv:
        return Reader(table.name, partial(_parquet_rows, paths, table))
    forms = {path: found_form(path, csv, table.names) for path in paths}
    return Reader(table.name, partial(_csv_rows, forms, table))


def _csv_rows(forms: Mapping[Path, CsvConfig], table: Table) -> Iterator[Row]:
    numbers = count(1)
    for path, form in forms.items():
        records = csv_records(path, form)
        _, header = next(records)
        table.check(header)
        for (line, cells), number in zip(records, numbers, strict=False):
            where = f"{path}:{line}"
            if not cells:
                continue
            if len(cells) != len(header):
                problem = f"must have {len(header)} cells as the header has, but got {len(cells)}"
                yield Row(where, None, [f"{problem} (read with {shown(form.delimiter)})"])
            else:
                yield table.row(where, number, dict(zip(header, cells, strict=True)), form)


def _parquet_rows(paths: Sequence[Path], table: Table) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = count(1)
    for path in paths:
        try:
            file = pq.ParquetFile(path)
            table.check(file.schema_arrow.names)
            batches = file.iter_batches(columns=table.names)
            rows = chain.from_iterable(_rows_of_batch(path, batch) for batch in batches)
            for in_file, (cells, number) in enumerate(zip(rows, numbers, strict=False), start=1):
                yield table.row(f"{path} row {in_file}", number, cells)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: must be a parquet file, but {error}.") from None


def _rows_of_batch(path: Path, batch: Any) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    except KeyError as error:
        raise DataError(f"{path}: a map must have each key once, but {error.args[0]}") from None
    return rows


_CSV_OPTIONS = {"sep", "delimiter", "encoding", "keep_default_na", "na_filter", "engine", "chunksize"}
"""The options of a data set's card with which its csv files are read here; the last four change nothing."""


def _hub_readers(config: SourceConfig, tasks: TaskConfigs) -> dict[str, Reader]:
    import datasets

    hub = config.hub
    assert hub is not None
    datasets.disable_progress_bars()
    _logger.info("loading the data set %s", hub.name)
    try:
        builder = datasets.load_dataset_builder(hub.name, hub.config, revision=hub.revision)
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs as an error, it raises too
        form = _hub_form(config, builder)
        files = _hub_files(builder)
        loaded: Any = files or datasets.load_dataset(hub.name, hub.config, revision=hub.revision)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises its own, the hub client's, and those of every format.
        cause = error.__cause__ or error  # of DatasetGenerationError, which says nothing itself
        raise DataError(
            f"data.hub.name: `datasets` cannot load `{hub.name}`: {type(cause).__name__}: "
            f"{shorten(str(cause), 300)} It must be the id of a public data set, or a local folder."
        ) from None
    splits = {str(ours): theirs for ours, theirs in hub.splits.items()}
    readers: dict[str, Reader] = {}
    for split in SPLITS:
        name = splits.get(split, split)
        if name in loaded:
            names = _class_names(builder.info.features if files else loaded[name].features)
            table = Table(f"{hub.name}[{name}]", split, config.columns, tasks, names)
            if files:
                readers[split] = _table_reader(builder.name == "csv", files[name], form, table)
            else:
                readers[split] = Reader(table.name, partial(_hub_rows, loaded[name], table))
        elif split in splits or split == "train":
            raise DataError(
                f"data.hub.splits.{split}: `{hub.name}` has no split `{name}`."
                f"{did_you_mean(name, sorted(map(str, loaded)))}"
            )
    return readers


def _hub_form(config: SourceConfig, builder: Any) -> CsvConfig:
    """Return `data.csv` with the delimiter and the encoding of the data set's card where it gives none.

    Raises DataError where `data.csv` does not fit the files, or the card has options that are not read.
    """
    form = config.csv
    if builder.name != "csv":
        if config.is_default("csv"):
            return form
        raise DataError(
            f"data.csv: is read with csv files, but the files are {builder.name}. Leave `data.csv` out."
        )
    given = _hub_options(builder)
    refused = [option for option in given if option not in _CSV_OPTIONS]
    for option, key in (("sep", "delimiter"), ("encoding", "encoding")):
        if option in given and getattr(form, key) is None:
            try:
                form = CsvConfig.model_validate({**form.model_dump(), key: given[option]})
            except ValidationError:
                refused.append(option)
    if refused:
        options = ", ".join(f"`{option}: {shorten(repr(given[option]), 60)}`" for option in refused)
        raise DataError(
            f"data.hub.name: the data set's card has options of csv that are not supported: {options}. "
            "Download the files, write them without these options, and use `source: csv`."
        )
    return form


def _hub_options(builder: Any) -> dict[str, Any]:
    """Return the options that the data set's card gives for its files."""
    ours = {"name", "version", "data_dir", "data_files", "description", "features"}
    options = {one.name: one.default for one in fields(builder.config) if one.name not in ours}
    return {name: value for name in options if (value := getattr(builder.config, name)) != options[name]}


def _hub_files(builder: Any) -> dict[str, list[Path]]:
    """Return the files of each split if this package reads them itself: csv, and parquet without features.

    pandas, with which `datasets` reads csv, renames a column whose name occurs twice, turns the class `007`
    into a number, reads "NA" as an empty cell, and fills rows that are too short. `datasets` knows no maps of
    parquet, but it knows the options and the features of a card.
    """
    import datasets
    import pyarrow.parquet as pq

    has_features = builder.info.features is not None or bool(_hub_options(builder))
    if builder.name != "csv" and (builder.name != "parquet" or has_features):
        return {}
    manager = datasets.DownloadManager()
    found = manager.download_and_extract(builder.config.data_files)
    files = {str(split): [*map(Path, manager.iter_files(of_split))] for split, of_split in found.items()}
    if builder.name == "parquet":
        heads = (pq.read_schema(file) for of_split in files.values() for file in of_split)
        if any(b"huggingface" in (head.metadata or {}) for head in heads):  # names of classes, for instance
            return {}
    return files


def _class_names(features: Any) -> dict[str, list[str]]:
    """Return the names of the classes that columns hold as numbers."""
    names = {
        column: getattr(getattr(feature, "feature", feature), "names", None)
        for column, feature in (features or {}).items()
    }
    return {column: list(of_column) for column, of_column in names.items() if of_column}


def _hub_rows(loaded: Any, table: Table) -> Iterator[Row]:
    table.check(loaded.column_names)
    for number, cells in enumerate(loaded.select_columns(table.names), start=1):
        yield table.row(f"{table.name} row {number}", number, cells)
