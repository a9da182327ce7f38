"""The form of a csv file: its encoding and the character between its cells.

- Encoding: UTF-8 if the whole file is that, else the one of `data.csv`. A file that is all ASCII, or has zero
  bytes, is in the given one.
- Delimiter: the first of the given one, `,` `;` tab `|` with which the header has all columns that are read.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from hpo.config.data_config import CsvConfig
from hpo.errors import DataError, did_you_mean, shorten

_logger = logging.getLogger("hpo.data")

DELIMITERS = (",", ";", "\t", "|")
_ADVICE = (
    "Save it as UTF-8, or name its encoding in `data.csv.encoding` (cp1252 of an Excel in Western Europe, "
    "cp1251, utf-16 ...)."
)
_PIECE = 1 << 20
_OTHER_FORMATS = {
    b"\x1f\x8b": "a gzip file",
    b"PK\x03\x04": "a zip or Excel file",
    b"\xd0\xcf\x11\xe0": "an Excel file",
    b"PAR1\x15": "a parquet file",
    b"ARROW1\x00": "an Arrow file",
    b"BZh9": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"(\xb5/\xfd": "a zstandard file",
}


def found_form(path: Path, config: CsvConfig, columns: Sequence[str]) -> CsvConfig:
    """`config` with the delimiter and the encoding that the file has, `columns` being those that are read.

    Raises DataError where the file is empty, no text, or its header lacks a column.
    """
    refuse_other_formats(path)
    encoding = _find_encoding(path, config.encoding)
    with path.open(encoding=encoding, newline="") as file:
        lines = file.readlines(_PIECE)
    if not "".join(lines).strip():
        raise DataError(f"{path}: the file is empty; its first line must name the columns.")
    headers = {mark: _header(lines, mark) for mark in (config.delimiter or ",", *DELIMITERS)}
    fits = (mark for mark, header in headers.items() if set(columns) <= set(header))
    delimiter = next(fits, None) or max(headers, key=lambda mark: len(headers[mark]))
    for name in columns:
        if name not in headers[delimiter]:
            why = f"read with {shown(delimiter)}; `data.csv.delimiter` sets it"
            hint = shorten(did_you_mean(name, headers[delimiter]), 200)
            raise DataError(f"{path}: has no column `{name}` ({why}). {hint}")
    if delimiter != (config.delimiter or ","):
        contradicts = ", not as `data.csv` says" if config.delimiter else ""
        _logger.info("%s: read with %s%s", path, shown(delimiter), contradicts)
    return config.model_copy(update={"delimiter": delimiter, "encoding": encoding})


def refuse_other_formats(path: Path, more: Mapping[bytes, str] = MappingProxyType({})) -> None:
    """Raises DataError for a file of another format, known by its first bytes; `more` adds formats."""
    with path.open("rb") as file:
        head = file.read(8)
    others = [
        (begin, f"{name}, but must be text. Unpack it, or save it as text")
        for begin, name in _OTHER_FORMATS.items()
    ]
    for begin, name in (*others, *more.items()):
        if head.startswith(begin):
            raise DataError(f"{path}: is {name}.")


def shown(delimiter: str | None) -> str:
    return "tab" if delimiter == "\t" else f"`{delimiter}`"


def _header(lines: Sequence[str], delimiter: str) -> list[str]:
    try:
        return next(csv.reader(lines, delimiter=delimiter, strict=True), [])
    except csv.Error:
        return []


def _find_encoding(path: Path, given: str | None) -> str:
    content = path.read_bytes()
    has_zeros = b"\0" in content
    if has_zeros and not given:
        raise DataError(f"{path}: must be UTF-8, but holds zero bytes, as UTF-16 does. {_ADVICE}")
    is_plain = content.isascii() or has_zeros
    for encoding in (given,) if given and is_plain else ("utf-8-sig", given):
        try:
            content.decode(encoding or "utf-8")
        except UnicodeError as error:
            problem = getattr(error, "reason", error)
        else:
            return encoding or "utf-8"
    raise DataError(f"{path}: must be {given or 'UTF-8'}, but cannot be decoded so: {problem}. {_ADVICE}")


def csv_records(path: Path, form: CsvConfig) -> Iterator[tuple[int, list[str]]]:
    """The records of a file of this form, the header first, each with the line it begins on; [] if blank.

    Raises DataError where it is no CSV.
    """
    csv.field_size_limit(2**31 - 1)  # Python's own limit of 131,072 characters is less than a long text.
    with path.open(encoding=form.encoding, newline="") as file:
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
