"""Rows of a data set from its files, each in the form of a jsonl line.

Without a column of ids, the split and the row's number are the id. An unreadable row is no error here: it is
a row with problems, reported with all others.

The form of a csv file is detected:

- Encoding: UTF-8 if the whole file is UTF-8, else the one of `data.csv`. A file of ASCII alone, or with zero
  bytes, has the given one.
- Delimiter: the given one, `,` `;` tab or `|`: the first with all needed columns in the header.
"""

import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hpo.code import errors_of_code
from hpo.config.allowed import DATA_DIR
from hpo.config.data_config import ColumnsConfig, CsvConfig, SourceConfig
from hpo.data.conll import conll_rows
from hpo.data.tables import Row, Table, TaskConfigs, read_jsonl_row, unique_keys
from hpo.errors import DataError, did_you_mean, shorten
from hpo.extensions import SOURCES

_logger = logging.getLogger("hpo.data")

SPLITS = ("train", "validation", "test")
JSON_LINES = (".jsonl", ".ndjson")
_NO_JSONL = {b"[": "a JSON array", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh91AY&SY": "bz2"}
_PACKED_ENDS = (".gz", ".zst", ".bz2")
_ARCHIVES = {b"PK\x03\x04": "a zip archive or Excel file", b"\xd0\xcf\x11\xe0": "an old Excel file"}
_ARCHIVES |= {b"PAR1\x15": "parquet", b"\xfd7zXZ": "an xz archive", b"7z\xbc\xaf": "a 7-Zip archive"}
DELIMITERS = (",", ";", "\t", "|")
_ADVICE = "Save it as UTF-8 text, or name its encoding in `data.csv.encoding` (cp1252, cp1251, utf-16 ...)."


@dataclass(frozen=True)
class Reader:
    """The rows of one split, read anew with every call of `rows`."""

    name: str
    rows: Callable[[], Iterator[Row]]


def located(config: SourceConfig) -> SourceConfig:
    """Return `config` with the paths of its data on this machine.

    If a path does not exist, its longest end inside the folder HPO_DATA_DIR replaces it:
    /home/a/sets/sgd becomes /data/home/a/sets/sgd, else /data/a/sets/sgd, and so on.
    """
    given = config.files
    changes: dict[str, Any] = {
        "path": config.path and _located(config.path),
        "files": given.model_copy(update={split: path and _located(path) for split, path in given}),
        "tasks": _located(config.tasks) if isinstance(config.tasks, Path) else config.tasks,
    }
    if config.hub is not None and config.hub.name.startswith("/"):
        changes["hub"] = config.hub.model_copy(update={"name": str(_located(Path(config.hub.name)))})
    return config.model_copy(update=changes)


def _located(path: Path) -> Path:
    root = os.environ.get(DATA_DIR)
    if path.exists() or not root:
        return path
    parts = Path(os.path.normpath(path)).parts[1:]
    ends = (Path(root, *parts[first:]) for first in range(len(parts)))
    moved = next((end for end in ends if end.exists()), None)
    if moved is not None:
        _logger.info("%s is not here; the data are read from %s", path, moved)
    return moved or path


def nearest_file(path: Path) -> str:
    """Return a hint for a missing file, for the end of a message."""
    if not path.parent.is_dir():
        return (
            f" There is no folder {path.parent}. If it lies elsewhere, set {DATA_DIR} to a folder above it."
        )
    names = sorted(item.name for item in path.parent.iterdir() if item.is_file())
    return did_you_mean(path.name, names[:50]) if names else f" {path.parent} is empty."


def own_readers(config: SourceConfig, tasks: TaskConfigs) -> dict[str, Reader]:
    """Return the readers of a source in the study's own code."""
    assert config.source is not None  # SourceConfig has checked it.
    own = SOURCES[config.source]
    options, readers = own.options.model_validate(config.options), {}
    for split in SPLITS:
        with errors_of_code():
            rows = list(own.make(split, options) or ())
        if rows or split == "train":
            name = f"{config.source} {split}"
            readers[split] = Reader(name, partial(_own_rows, rows, name, split, tasks))
    return readers


def _own_rows(rows: list[Any], name: str, split: str, tasks: TaskConfigs) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        where = f"{name} row {number}"
        try:
            plain = json.loads(json.dumps(row))
        except (TypeError, ValueError) as error:
            yield Row(where, None, [f"must be a value of JSON, but {error}"])
        else:
            yield read_jsonl_row(Row(where, plain), f"{split}-{number}", tasks)


def file_readers(config: SourceConfig, tasks: TaskConfigs) -> dict[str, Reader]:
    """Return the readers of jsonl, csv, parquet or conll files."""
    readers: dict[str, Reader] = {}
    for split in SPLITS:
        given = getattr(config.files, split)
        path = given or (config.path and _file_in(config.path, f"{split}.{config.source}"))
        if path is None or not (given or path.exists() or split == "train"):
            continue
        if not path.is_file():
            raise DataError(f"{path}: no such file; the {split} split must be there.{nearest_file(path)}")
        if config.source == "jsonl" and config.is_default("columns"):
            readers[split] = Reader(str(path), partial(_labelled_rows, path, split, tasks))
            continue
        table = Table(str(path), split, config.columns, tasks)
        if config.source == "csv":
            readers[split] = csv_reader([path], config.csv, table)
        else:
            rows = {"jsonl": _flat_rows, "parquet": _parquet_rows, "conll": conll_rows}[str(config.source)]
            readers[split] = Reader(table.name, partial(rows, path, table))
    return readers


def _file_in(folder: Path, name: str) -> Path:
    """Return the file of this name, or a compressed one in its place: csv and jsonl may be."""
    path = folder / name
    ends = () if path.exists() or path.suffix not in (".csv", ".jsonl") else _PACKED_ENDS
    return next(filter(Path.exists, (path.with_name(name + end) for end in ends)), path)


def _bare_suffix(path: Path) -> str:
    """Return the suffix in small letters, `.csv` for `texts.csv.gz`."""
    return (path.with_suffix("") if path.suffix.lower() in _PACKED_ENDS else path).suffix.lower()


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open the bytes of a file, uncompressed. Raises DataError for an archive or a cut file."""
    with path.open("rb") as file:
        head = file.peek(16)
        if name := _form_of(head, _ARCHIVES):
            raise DataError(f"{path}: must be text, but is {name}. Unpack or export it.")
        if (codec := _form_of(head, _PACKED)) is None:
            yield file
            return
    try:
        with io.BufferedReader(pa.input_stream(str(path), compression=codec)) as unpacked:
            yield unpacked
    except OSError as error:
        raise DataError(f"{path}: must be a whole {codec} file, but: {error}. Copy it again.") from None


def _form_of(head: bytes, forms: Mapping[bytes, str]) -> str | None:
    return next((form for first, form in forms.items() if head.startswith(first)), None)


def text_rows(path: Path, columns: ColumnsConfig, form: CsvConfig) -> Iterator[Row]:
    """Yield the rows of a file of texts to predict: jsonl, csv or parquet by its suffix, else lines of text,
    or CoNLL if the column of tokens is a number and the suffix is not txt.

    A table may lack the column of ids. `form` is that of the study's csv files; this file may have another.
    Raises DataError if the file cannot be read.
    """
    table = Table(str(path), "row", columns, None)
    try:
        match _bare_suffix(path):
            case suffix if suffix in JSON_LINES:
                yield from _jsonl_rows(path)
            case ".csv":
                yield from _csv_rows({path: detected_form(path, form, columns.texts)}, table)
            case ".parquet":
                yield from _parquet_rows(path, table)
            case suffix if suffix != ".txt" and (columns.tokens or "").lstrip("-").isdecimal():
                yield from conll_rows(path, table)
            case _:
                yield from _lines(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from None


def _lines(path: Path) -> Iterator[Row]:
    """Yield a row for each line, without blank lines at the end."""
    with _opened(path) as file:
        lines = file.read().removeprefix(b"\xef\xbb\xbf").splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            yield Row(f"{path}:{number}", {"id": f"row-{number}", "text": line.decode()})
        except UnicodeDecodeError as error:
            yield Row(f"{path}:{number}", None, [f"must be UTF-8, but {error}"])


def _labelled_rows(path: Path, split: str, tasks: TaskConfigs) -> Iterator[Row]:
    for number, row in enumerate(_jsonl_rows(path), start=1):
        yield read_jsonl_row(row, f"{split}-{number}", tasks)


def _flat_rows(path: Path, table: Table) -> Iterator[Row]:
    """Yield the rows of jsonl with columns as keys. A row may lack a key, as if it were null, but not all."""
    keys: dict[str, None] = {}
    for number, row in enumerate(_jsonl_rows(path), start=1):
        if isinstance(row.row, dict):
            keys |= dict.fromkeys(row.row)
            row = table.row(row.where, number, dict.fromkeys(table.names) | row.row)
        yield row
    table.check([*keys])


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with _opened(path) as lines:
        first = lines.peek(1000).removeprefix(b"\xef\xbb\xbf").lstrip()
        if is_a := _form_of(first, _NO_JSONL):
            raise DataError(
                f"{path}: must be UTF-8 with a JSON object on each line, but is {is_a}. Rewrite it."
            )
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield Row(f"{path}:{number}", json.loads(line, object_pairs_hook=unique_keys))
            except (ValueError, RecursionError) as error:
                yield Row(f"{path}:{number}", None, [f"must be one JSON object in UTF-8, but {error}"])


def detected_form(path: Path, config: CsvConfig, columns: Sequence[str]) -> CsvConfig:
    """Return `config` with the delimiter and the encoding of the file; `columns` are the columns to read.

    Raises DataError if the file is empty or no text, or its header lacks a column.
    """
    encoding = _detect_encoding(path, config.encoding)
    with _opened(path) as raw, io.TextIOWrapper(raw, encoding, newline="") as file:
        lines = file.readlines(1 << 20)
    if not "".join(lines).strip():
        raise DataError(f"{path}: the file is empty; its first line must name the columns.")
    marks = (config.delimiter or ",", *(DELIMITERS if config.header or not config.delimiter else ()))
    rows = {mark: _records(lines, mark, 1 if config.header else None) for mark in marks}
    headers = {mark: _header(next(iter(rows[mark]), []), config) for mark in marks}
    fits = [mark for mark, header in headers.items() if set(columns) <= set(header)]
    if not config.header:  # another mark may fit the first line by chance
        widths = {mark: (len(headers[mark]), [*map(len, rows[mark])]) for mark in marks}
        fits.sort(key=lambda mark: (widths[mark][1].count(widths[mark][0]), widths[mark][0]), reverse=True)
    delimiter = fits[0] if fits else max(headers, key=lambda mark: len(headers[mark]))
    header = headers[delimiter]
    for name in columns:
        if name not in header:
            hint = shorten(did_you_mean(name, header), 200)
            if config.header and not {*map(str.casefold, columns)} & {*map(str.casefold, header)}:
                hint += " If its first line is no header, set `data.csv.header: false`."
            is_split = len(header) > 1 or all(map(str.isidentifier, header))
            other = "" if is_split else "; `data.csv.delimiter` sets another delimiter"
            raise DataError(f"{path}: has no column `{name}` (read with {shown(delimiter)}{other}). {hint}")
    if delimiter != (config.delimiter or ","):
        contradicts = ", not as `data.csv` says" if config.delimiter else ""
        _logger.info("%s: read with %s%s", path, shown(delimiter), contradicts)
    return config.model_copy(update={"delimiter": delimiter, "encoding": encoding})


def shown(delimiter: str | None) -> str:
    return "tab" if delimiter == "\t" else f"`{delimiter}`"


def _records(lines: Sequence[str], delimiter: str, limit: int | None) -> list[list[str]]:
    records: list[list[str]] = []
    with suppress(csv.Error):
        records.extend(islice(csv.reader(lines, delimiter=delimiter, strict=True), limit))
    return records if limit else [*filter(None, records)]


def _header(first: Sequence[str], form: CsvConfig) -> Sequence[str]:
    return first if form.header else form.names or [*map(str, range(len(first)))]


def _detect_encoding(path: Path, given: str | None) -> str:
    with _opened(path) as file:
        content = file.read()
    has_zeros = b"\0" in content
    if has_zeros and not given:
        raise DataError(f"{path}: must be UTF-8, but holds zero bytes, as UTF-16 does. {_ADVICE}")
    for encoding in (given,) if given and (content.isascii() or has_zeros) else ("utf-8-sig", given):
        try:
            content.decode(encoding or "utf-8")
        except UnicodeError as error:
            problem = getattr(error, "reason", error)
        else:
            return encoding or "utf-8"
    raise DataError(f"{path}: must be {given or 'UTF-8'}, but cannot be decoded: {problem}. {_ADVICE}")


def csv_records(path: Path, form: CsvConfig) -> Iterator[tuple[int, list[str]]]:
    """Yield the records of a file of this form with their first lines, the header first; [] if blank.

    Raises DataError for broken CSV.
    """
    csv.field_size_limit(2**31 - 1)  # Python's own limit of 131,072 characters is less than a long text.
    with _opened(path) as raw, io.TextIOWrapper(raw, form.encoding, newline="") as file:
        records = csv.reader(file, delimiter=form.delimiter or ",", strict=True)
        end = 0
        try:
            for cells in records:
                begin, end = end + 1, records.line_num
                yield begin, cells
        except csv.Error as error:
            raise DataError(
                f"{path}:{end + 1}: must be CSV, but the row that begins here is not: {error} (read with "
                f"{shown(form.delimiter)}; a quote in a text is doubled)."
            ) from None


def csv_reader(paths: Sequence[Path], form: CsvConfig, table: Table) -> Reader:
    forms = {path: detected_form(path, form, table.names) for path in paths}
    return Reader(table.name, partial(_csv_rows, forms, table))


def _csv_rows(forms: Mapping[Path, CsvConfig], table: Table) -> Iterator[Row]:
    numbers = count(1)
    for path, form in forms.items():
        records = csv_records(path, form)
        begin, first = next(records) if form.header else next(filter(itemgetter(1), records))
        header = _header(first, form)
        table.check(header)
        records = records if form.header else chain([(begin, first)], records)
        for (line, cells), number in zip(records, numbers, strict=False):
            where = f"{path}:{line}"
            if not cells:
                continue
            if len(cells) != len(header):
                model = "header" if form.header else "`csv.names`" if form.names else "first row"
                problem = f"must have {len(header)} cells as the {model} has, but got {len(cells)}"
                yield Row(where, None, [f"{problem} (read with {shown(form.delimiter)})"])
            else:
                yield table.row(where, number, dict(zip(header, cells, strict=True)), form)


def _parquet_rows(path: Path, table: Table) -> Iterator[Row]:
    for number, cells in enumerate(_parquet_cells(path, table), start=1):
        yield table.row(f"{path} row {number}", number, cells)


def _parquet_cells(path: Path, table: Table) -> Iterator[dict[str, Any]]:
    try:
        file = pq.ParquetFile(path)
        table.check(file.schema_arrow.names)
        for batch in file.iter_batches(columns=table.names):
            yield from batch.to_pylist(maps_as_pydicts="strict")
    except KeyError as error:
        raise DataError(f"{path}: a map must have each key once, but {error.args[0]}") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: must be a parquet file, but {error}.") from None
