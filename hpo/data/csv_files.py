"""The form of a csv file: its encoding and the character between its cells.

- Encoding: UTF-8 if the whole file is UTF-8, else the one of `data.csv`. A file of ASCII alone, or with zero
  bytes, has the given one.
- Delimiter: the given one, `,` `;` tab or `|`: the first with all needed columns in the header.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpo.config.data_config import CsvConfig
from hpo.errors import DataError, did_you_mean, shorten

_logger = logging.getLogger("hpo.data")

DELIMITERS = (",", ";", "\t", "|")
_ADVICE = "Save it as UTF-8 text, or name its encoding in `data.csv.encoding` (cp1252, cp1251, utf-16 ...)."


def detected_form(path: Path, config: CsvConfig, columns: Sequence[str]) -> CsvConfig:
    """Return `config` with the delimiter and the encoding of the file; `columns` are the columns to read.

    Raises DataError if the file is empty or no text, or its header lacks a column.
    """
    encoding = _detect_encoding(path, config.encoding)
    with path.open(encoding=encoding, newline="") as file:
        lines = file.readlines(1 << 20)
    if not "".join(lines).strip():
        raise DataError(f"{path}: the file is empty; its first line must name the columns.")
    headers = {mark: _header(lines, mark) for mark in (config.delimiter or ",", *DELIMITERS)}
    fits = (mark for mark, header in headers.items() if set(columns) <= set(header))
    delimiter = next(fits, None) or max(headers, key=lambda mark: len(headers[mark]))
    for name in columns:
        if name not in headers[delimiter]:
            hint = shorten(did_you_mean(name, headers[delimiter]), 200)
            other = "" if len(headers[delimiter]) > 1 else "; `data.csv.delimiter` sets another delimiter"
            raise DataError(f"{path}: has no column `{name}` (read with {shown(delimiter)}{other}). {hint}")
    if delimiter != (config.delimiter or ","):
        contradicts = ", not as `data.csv` says" if config.delimiter else ""
        _logger.info("%s: read with %s%s", path, shown(delimiter), contradicts)
    return config.model_copy(update={"delimiter": delimiter, "encoding": encoding})


def shown(delimiter: str | None) -> str:
    return "tab" if delimiter == "\t" else f"`{delimiter}`"


def _header(lines: Sequence[str], delimiter: str) -> list[str]:
    try:
        return next(csv.reader(lines, delimiter=delimiter, strict=True), [])
    except csv.Error:
        return []


def _detect_encoding(path: Path, given: str | None) -> str:
    content = path.read_bytes()
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
