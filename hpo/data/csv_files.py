"""How a csv file is written: its encoding, the character between its cells, the one between listed classes.

What is not as `data.csv` says, or not plain CSV where it says nothing, is logged:

- Encoding: a byte order mark decides; then UTF-8, if the whole file is that and not all of it ASCII, for in
  an encoding of single bytes it would be other letters, without an error; then the one that is given; then
  cp1252, which Excel writes in Western Europe, if `charset-normalizer` finds it plausible. Its free guess
  takes German for mac_iceland and Greek for shift_jis: any other file is refused until `data.csv.encoding`
  names its encoding.
- Delimiter: the first of the one that is given, `,` `;` tab `|` with which the header has all columns that
  are read.
- List separator: `|`, unless the cells of the training file hold none and show that they are lists of
  `;` or `,`.
"""

from __future__ import annotations

import codecs
import csv
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from charset_normalizer import from_bytes

from hpo.config.data_config import CsvConfig
from hpo.data.progress import logger
from hpo.errors import DataError, did_you_mean, shorten

DELIMITERS = (",", ";", "\t", "|")
_PIECE = 1 << 20
_SAMPLE_ROWS = 20_000
_SAMPLE_LINES = 1000

_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


@dataclass(frozen=True)
class CsvForm:
    """How one csv file is written."""

    path: Path
    delimiter: str
    encoding: str

    @property
    def name(self) -> str:
        """The delimiter in a message."""
        return "tab" if self.delimiter == "\t" else f"`{self.delimiter}`"


def find_form(path: Path, config: CsvConfig, columns: Sequence[str]) -> CsvForm:
    """How the file is written, `columns` being those that are read of it.

    Raises DataError where the file is empty, no text, or its header lacks a column.
    """
    encoding = _find_encoding(path, config.encoding)
    with path.open(encoding=encoding, newline="") as file:
        lines = file.readlines(_PIECE)
    if not "".join(lines).strip():
        raise DataError(f"{path}: the file is empty; its first line must name the columns.")
    headers = {mark: _header(lines, mark) for mark in (config.delimiter or ",", *DELIMITERS)}
    fits = (mark for mark, header in headers.items() if set(columns) <= set(header))
    delimiter = next(fits, None) or max(headers, key=lambda mark: len(headers[mark]))
    form = CsvForm(path, delimiter, encoding)
    for name in columns:
        if name not in headers[delimiter]:
            why = f"read with {form.name}; `data.csv.delimiter` sets it"
            hint = shorten(did_you_mean(name, headers[delimiter]), 200)
            raise DataError(f"{path}: has no column `{name}` ({why}). {hint}")
    _log(form, config)
    return form


def _log(form: CsvForm, config: CsvConfig) -> None:
    encoding, given = (_name(name) for name in (form.encoding, config.encoding or "utf-8"))
    said = [f"read with {form.name}"] if form.delimiter != (config.delimiter or ",") else []
    said += [f"decoded as {encoding}"] if encoding != given else []
    is_other = config.delimiter not in (None, form.delimiter) or (config.encoding and encoding != given)
    if said:
        logger.info("%s: %s%s", form.path, ", ".join(said), ", not as `data.csv` says" if is_other else "")


def _name(encoding: str) -> str:
    return codecs.lookup(encoding).name.removesuffix("-sig")


def _header(lines: Sequence[str], delimiter: str) -> list[str]:
    try:
        return next(csv.reader(lines, delimiter=delimiter, strict=True), [])
    except csv.Error:
        return []


def _find_encoding(path: Path, given: str | None) -> str:
    content = path.read_bytes()
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), None)
    if encoding is None and b"\0" in content[:4096] and given is None:
        raise DataError(
            f"{path}: must be a csv file, but it holds zero bytes: it is of another format, or UTF-16 "
            "without a byte order mark, which `data.csv.encoding: utf-16-le` reads."
        )
    if encoding is None:
        is_utf8 = not content.isascii() and not _problem(content, "utf-8")
        encoding = "utf-8" if is_utf8 or given is None else given
    if not (problem := _problem(content, encoding)):
        return encoding
    # Half a character at the very end is a file that was cut off, not another encoding.
    may_be_western = given is None and encoding == "utf-8" and problem != "unexpected end of data"
    foreign = (line for line in content.splitlines(keepends=True) if not line.isascii())
    if may_be_western and is_western(b"".join(islice(foreign, _SAMPLE_LINES))):
        return "cp1252"
    raise DataError(
        f"{path}: must be {_name(encoding)}, but cannot be decoded so: {problem}. Save it as UTF-8, or name "
        "its encoding in `data.csv.encoding` (cp1250, cp1251, shift_jis ...)."
    )


def is_western(lines: bytes) -> bool:
    """Whether lines that are not ASCII look like a Western European language in cp1252."""
    return from_bytes(lines, cp_isolation=["cp1252"], threshold=0.5).best() is not None


def _problem(content: bytes, encoding: str) -> str:
    """Why the content cannot be decoded; empty: it can."""
    try:
        content.decode(encoding)
    except UnicodeDecodeError as error:
        return error.reason
    except UnicodeError as error:
        return str(error)
    return ""


def csv_records(form: CsvForm) -> Iterator[tuple[int, list[str]]]:
    """The records of the file, the header first, each with the line it begins on; [] for a blank line.

    Raises DataError where it is no CSV.
    """
    csv.field_size_limit(2**31 - 1)  # Python's own limit of 131,072 characters is less than a long text.
    with form.path.open(encoding=form.encoding, newline="") as file:
        records = csv.reader(file, delimiter=form.delimiter, strict=True)
        end = 0
        try:
            for cells in records:
                begin, end = end + 1, records.line_num
                yield begin, cells
        except csv.Error as error:
            raise DataError(
                f"{form.path}:{end + 1}: must be CSV, but the row that begins here is not: {error} (read "
                f"with {form.name}; a quote in a text is doubled)."
            ) from None


def find_list_separator(form: CsvForm, column: str, classes: Collection[str] | None) -> str:
    """The character between the classes of a cell of `column`; `classes` are its task's, where known.

    Cells are lists of `;` or `,` where their parts are classes, or, those not being known, where half of the
    parts stand in several different cells.
    """
    records = csv_records(form)
    _, header = next(records)
    rows = (cells for _, cells in islice(records, _SAMPLE_ROWS) if len(cells) == len(header))
    cells = {cell for row in rows if (cell := row[header.index(column)].strip()) and cell[0] != "["}
    for separator in ("|", ";", ","):
        lists = [cell for cell in cells if separator in cell]
        if separator == "|" and lists:
            return separator
        if lists and _are_lists(lists, cells, separator, classes):
            logger.info("%s: cells of `%s` are lists with `%s`", form.path, column, separator)
            return separator
        if lists and classes is None:
            what = "%s: cells of `%s` hold `%s` and are read as one class each; if they are lists, set "
            logger.info(what + "`data.csv.list_separator`", form.path, column, separator)
    return "|"


def _are_lists(
    lists: Collection[str], cells: Collection[str], separator: str, classes: Collection[str] | None
) -> bool:
    parts = {part for cell in lists for part in split_cell(cell, separator)}
    if classes is not None:
        return parts <= set(classes) and not set(lists) & set(classes)
    num_cells = Counter(part for cell in cells for part in set(split_cell(cell, separator)))
    return 2 * sum(num_cells[part] > 1 for part in parts) >= len(parts)


def split_cell(cell: str, separator: str) -> list[str]:
    """The parts of a cell, without those that are empty."""
    return [part for piece in cell.split(separator) if (part := piece.strip())]
