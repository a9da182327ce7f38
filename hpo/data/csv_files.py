"""How a csv file is written: its encoding, the character between its cells, the one between listed classes.

What `data.csv` does not give is found out, and said on the logger, so that nobody has to guess what was
guessed:

- Delimiter: the first of `,` `;` tab `|` with which the header has all columns that are read. A first line
  `sep=;`, which Excel writes, decides.
- Encoding: a byte order mark decides; then UTF-8, if the whole file is that; then cp1252, which Excel writes
  in Western Europe, if what comes out looks like its languages. A text in another alphabet does not, and
  statistical detectors take German for Hungarian and Russian for Greek: such a file is refused until
  `data.csv.encoding` names its encoding.
- List separator: `|`, unless the cells of the training file hold none and show that they are lists of
  `;` or `,`.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hpo.config.data_config import CsvConfig
from hpo.data.progress import logger
from hpo.errors import DataError, did_you_mean, shorten

DELIMITERS = (",", ";", "\t", "|")
LIST_SEPARATORS = ("|", ";", ",")
_PIECE = 1 << 20
_SAMPLE_ROWS = 20_000

_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins with UTF-16's
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_OTHER_FORMATS = {
    b"PK\x03\x04": "an Excel workbook or another zip archive; save it as `CSV UTF-8`",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook; save it as `CSV UTF-8`",
    b"PAR1": "a parquet file; set `data.source: parquet`",
    b"\x1f\x8b": "compressed by gzip; unpack it",
    b"%PDF": "a PDF",
}
_PUNCTUATION = frozenset("\u2018\u2019\u201a\u201c\u201d\u201e\u2039\u203a«»–—…•·°§´€£©®™½¼¾²³µ×±\xa0¿¡")
_IN_WORDS = frozenset("\u2018\u2019´–·\xa0")


@dataclass(frozen=True)
class CsvForm:
    """How one csv file is written."""

    path: Path
    delimiter: str
    encoding: str
    header_at: int
    """Lines before the header: 1 where the first line is `sep=;`."""

    @property
    def name(self) -> str:
        """The delimiter in a message."""
        return show_character(self.delimiter)


def show_character(character: str) -> str:
    return "tab" if character == "\t" else f"`{character}`"


def find_form(path: Path, config: CsvConfig, columns: Sequence[str]) -> CsvForm:
    """How the file is written, `columns` being those that are read of it. Logs what is not plain CSV.

    Raises DataError where the file is empty, no text, or its header lacks a column.
    """
    encoding, is_crlf = _find_encoding(path, config.encoding)
    with path.open(encoding=encoding, newline="") as file:
        first = file.readline(_PIECE)
        sep = re.fullmatch(r"sep=(.)[\r\n]*", first)
        lines = file.readlines(_PIECE) if sep else [first, *file.readlines(_PIECE)]
    if not "".join(lines).strip():
        raise DataError(f"{path}: the file is empty; its first line must name the columns.")
    given = config.delimiter or (sep and sep[1])
    header = {mark: _header(lines, mark) for mark in dict.fromkeys([given or ",", *DELIMITERS])}
    fits = [mark for mark, names in header.items() if set(columns) <= set(names)]
    delimiter = given or next(iter(fits), None) or max(DELIMITERS, key=lambda mark: len(header[mark]))
    for name in columns:
        if name not in header[delimiter]:
            raise DataError(_lacks(path, name, header[delimiter], delimiter, config.delimiter, fits))
    said = [f"read with {show_character(delimiter)}"] if delimiter != "," else []
    if encoding != "utf-8":
        mark = " (byte order mark)" if encoding in _MARKS.values() and not config.encoding else ""
        said.append(f"decoded as {encoding.removesuffix('-sig')}{mark}")
    if said and is_crlf:
        said.append("CRLF line ends")
    if said:
        logger.info("%s: %s", path, ", ".join(said))
    return CsvForm(path, delimiter, encoding, 1 if sep else 0)


def find_form_of_texts(path: Path, config: CsvConfig, columns: Sequence[str]) -> CsvForm:
    """As `find_form`, of texts to predict, where `config` is the form of the study's files.

    Another program may have written this one: what does not fit it is found out instead, with a warning. A
    file that is UTF-8 beyond ASCII is read as that: in an encoding of single bytes it would be other letters,
    without an error. Raises DataError where the file cannot be read either way.
    """
    tries = [config.model_copy(update=dict.fromkeys(left)) for left in _LEFT_OUT]
    if not _name(config.encoding or "utf-8").startswith("utf") and _is_utf8_beyond_ascii(path):
        tries = [one for one in tries if one.encoding is None]
    refused: list[DataError] = []
    for one in dict.fromkeys(tries):
        try:
            form = find_form(path, one, columns)
        except DataError as error:
            refused.append(error)
            continue
        if wrong := _given_otherwise(form, config):
            logger.warning("%s: %s, unlike the study's files (its `data.csv`)", path, wrong)
        return form
    raise refused[0]


_LEFT_OUT = ((), ("delimiter",), ("encoding",), ("delimiter", "encoding"))
"""What of a given form is found out instead, in the order in which it is tried."""


def _given_otherwise(form: CsvForm, config: CsvConfig) -> str:
    """What of the form is not as `config` gives it; "" where all is."""
    found = []
    if config.delimiter not in (None, form.delimiter):
        found.append(f"read with {form.name}")
    if config.encoding is not None:
        used = _name(form.encoding)
        if not _name(config.encoding).startswith(
            used
        ):  # utf-16-le, with a byte order mark, is read as utf-16
            found.append(f"decoded as {used}")
    return ", ".join(found)


def _name(encoding: str) -> str:
    return codecs.lookup(encoding).name.removesuffix("-sig")


def _is_utf8_beyond_ascii(path: Path) -> bool:
    foreign: list[str] = []
    try:
        _decode(path, "utf-8", foreign)
    except UnicodeDecodeError:
        return False
    return bool(foreign)


def _header(lines: Iterable[str], delimiter: str) -> list[str]:
    try:
        return next(csv.reader(lines, delimiter=delimiter, strict=True), [])
    except csv.Error:
        return []


def _lacks(
    path: Path, name: str, header: Sequence[str], delimiter: str, given: str | None, fits: Sequence[str]
) -> str:
    shown = show_character(delimiter)
    if fits:
        return (
            f"{path}: must have a column `{name}`, but read with {shown}, as `data.csv.delimiter` says, it "
            f"has {shorten(', '.join(header), 100) or 'none'}. With {show_character(fits[0])} it has all."
        )
    if len(header) > 1 or given:
        why = f" (read with {shown}; `data.csv.delimiter` sets it)" if delimiter != "," or given else ""
        return f"{path}: has no column `{name}`.{did_you_mean(name, header)}{why}"
    only = shorten(header[0] if header else "", 80)
    return (
        f"{path}: has no column `{name}`: its header is `{only}`, in which none of `,`, `;`, tab and `|` "
        "separates names. If another character does, name it in `data.csv.delimiter`."
    )


def _find_encoding(path: Path, given: str | None) -> tuple[str, bool]:
    """The encoding's name and whether lines end in CRLF. Reads the whole file, in pieces."""
    with path.open("rb") as file:
        head = file.read(4096)
    for magic, what in _OTHER_FORMATS.items():
        if head.startswith(magic):
            raise DataError(f"{path}: must be a csv file, but this is {what}.")
    is_crlf = b"\r\n" in head or b"\r\0\n" in head
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
    if given is not None:
        same = marked is not None and codecs.lookup(given).name in ("utf-8", "utf-16-le", "utf-16-be")
        encoding = marked if same and marked is not None else given
        _check_decodes(path, encoding, f"as `data.csv.encoding` says, must be {given}")
        return encoding, is_crlf
    if marked is not None:
        _check_decodes(path, marked, f"by its byte order mark it is {marked.removesuffix('-sig')}")
        return marked, is_crlf
    if b"\0" in head:
        raise DataError(
            f"{path}: must be a csv file, but it holds zero bytes: it is no text, or UTF-16 without a byte "
            "order mark, which `data.csv.encoding: utf-16-le` reads."
        )
    try:
        _decode(path, "utf-8", None)
    except UnicodeDecodeError as error:
        # Half a character at the very end is a file that was cut, not another encoding.
        if error.reason == "unexpected end of data":
            raise DataError(
                f"{path}: must be UTF-8, but it ends within a character: it was cut off."
            ) from None
        return _western(path, error), is_crlf
    return "utf-8", is_crlf


def _western(path: Path, error: UnicodeDecodeError) -> str:
    """cp1252, where the file's text looks like that."""
    foreign: list[str] = []
    try:
        _decode(path, "cp1252", foreign)
    except UnicodeDecodeError:
        foreign = []
    if not foreign or not looks_western("".join(foreign)):
        raise DataError(
            f"{path}: must be UTF-8, but {error.reason} (byte 0x{error.object[error.start]:02x}), and it "
            "does not look like cp1252 either. Name its encoding in `data.csv.encoding` (cp1250, cp1251, "
            "shift_jis ...), or save it as UTF-8."
        ) from None
    return "cp1252"


def looks_western(text: str) -> bool:
    """Whether letters outside ASCII stand as in Western European languages: seldom three in a row, as in
    Cyrillic or Greek, and no signs within words, as of Polish read so."""
    found = odd = 0
    for match in re.finditer(r"[^\x00-\x7f]+", text):
        run, start, end = match[0], match.start(), match.end()
        found += len(run)
        if len(run) > 2:
            odd += sum(character.isalpha() for character in run)
        elif len(run) == 1 and not run.isalpha():
            is_within = text[start - 1 : start].isalpha() and text[end : end + 1].isalpha()
            odd += run not in (_IN_WORDS if is_within else _PUNCTUATION)
    return odd <= 0.25 * found


def _decode(path: Path, encoding: str, foreign: list[str] | None) -> None:
    """Decode the file in pieces; keep in `foreign` the first lines that are not ASCII.

    Raises UnicodeDecodeError.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            text = decoder.decode(piece)
            if foreign is not None and len(foreign) < 1000:
                foreign += [line for line in text.splitlines() if not line.isascii()][:1000]
        decoder.decode(b"", final=True)


def _check_decodes(path: Path, encoding: str, why: str) -> None:
    try:
        _decode(path, encoding, None)
    except UnicodeError as error:
        found = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError(f"{path}: {why}, but it cannot be decoded so: {found}.") from None


def csv_records(form: CsvForm) -> Iterator[tuple[int, list[str]]]:
    """The records of the file, the header first, each with the line it begins on; [] for a blank line.

    Raises DataError where it is no CSV.
    """
    csv.field_size_limit(2**31 - 1)  # Python's own limit of 131,072 characters is less than a long text.
    with form.path.open(encoding=form.encoding, newline="") as file:
        for _ in range(form.header_at):
            file.readline()
        records = csv.reader(file, delimiter=form.delimiter, strict=True)
        end = 0
        try:
            for cells in records:
                begin, end = end + 1 + form.header_at, records.line_num
                yield begin, cells
        except csv.Error as error:
            raise DataError(_no_csv(form, error, end, records.line_num)) from None


def _no_csv(form: CsvForm, error: csv.Error, end: int, line: int) -> str:
    if "unexpected end of data" in str(error):
        return (
            f"{form.path}:{end + 1 + form.header_at}: must be CSV, but a quote that opens in this row is not "
            "closed until the end of the file: the file was cut off, or a quote in a text is not doubled."
        )
    return f"{form.path}:{line + form.header_at}: must be CSV, but {error} (read with {form.name})."


def find_list_separator(
    form: CsvForm, columns: Sequence[str], classes: Sequence[Collection[str] | None]
) -> str:
    """The character between the classes of a cell of `columns`; `classes` are theirs, where they are known.

    Cells are lists of `;` or `,` where their parts are classes, or, those not being known, where half of the
    parts stand in several different cells.
    """
    cells: list[Counter[str]] = [Counter() for _ in columns]
    records = csv_records(form)
    _, header = next(records)
    at = [header.index(column) for column in columns]
    for _, record in islice(records, _SAMPLE_ROWS):
        if len(record) == len(header):
            for counter, index in zip(cells, at, strict=True):
                counter[record[index].strip()] += 1
    plain = [[cell for cell in of if cell and not cell.startswith("[")] for of in cells]
    if any("|" in cell for of in plain for cell in of):
        return "|"
    for separator in LIST_SEPARATORS[1:]:
        for column, of, known in zip(columns, plain, classes, strict=True):
            holding = [cell for cell in of if separator in cell]
            if not holding:
                continue
            if _are_lists(holding, of, separator, known):
                logger.info("%s: cells of `%s` are lists with `%s`", form.path, column, separator)
                return separator
            if known is None:
                logger.info(
                    "%s: cells of `%s` hold `%s` and are read as one class each; if they are lists, set "
                    "`data.csv.list_separator`",
                    form.path,
                    column,
                    separator,
                )
    return "|"


def split_cell(cell: str, separator: str) -> list[str]:
    """The parts of a cell, without those that are empty."""
    return [part for piece in cell.split(separator) if (part := piece.strip())]


def _are_lists(
    holding: Sequence[str], cells: Sequence[str], separator: str, known: Collection[str] | None
) -> bool:
    if known is not None:
        return all(cell not in known for cell in holding) and all(
            part in known for cell in holding for part in split_cell(cell, separator)
        )
    stands_in = Counter(part for cell in cells for part in set(split_cell(cell, separator)))
    parts = {part for cell in holding for part in split_cell(cell, separator)}
    return 2 * sum(stands_in[part] > 1 for part in parts) >= len(parts)
