"""Sentences of CoNLL files: a token with its columns on each line, and a blank line after each sentence.

The first token's line tells whether tabs or spaces separate columns, and their number. A line with `#` is a
comment before the first token of a sentence if it has another number of columns: so a token `#` stays.
-DOCSTART- and `# newdoc` begin a document. The lines `1-2` and `1.1` of CoNLL-U, which repeat or add words,
are skipped unless the tokens are in the first column.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from hpo.data.tables import Row, Table
from hpo.errors import DataError

_EXTRA_WORD = re.compile(r"\d+[-.]\d+\t")


def conll_rows(path: Path, table: Table) -> Iterator[Row]:
    """Yield a row for each sentence. Raises DataError if the file is not UTF-8, or lacks a column."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: must be UTF-8, but {error}.") from None
    form = next((one for one in lines if one.strip() and not one.startswith(("#", "-DOCSTART-"))), "")
    separator = re.compile("\t" if "\t" in form else "[ \t]+")
    width = len(separator.split(form.strip(" ")))
    names = [str(column) for column in range(-width, width)]
    table.check([*names, "document"])
    sentence, skips = list[list[str]](), "0" not in table.names
    number = document = 0
    for line_number, line in enumerate([*lines, ""], start=1):
        cells = separator.split(line.strip(" "))
        if not line.strip():
            if sentence:
                number += 1
                where = f"{path}:{line_number - len(sentence)}"
                if bad := {len(one) for one in sentence} - {width}:
                    yield Row(where, None, [f"each line must have {width} columns, but one has {bad.pop()}"])
                else:
                    of_row = dict(zip(names, [*map(list, zip(*sentence, strict=True))] * 2, strict=True))
                    yield table.row(where, number, of_row | {"document": f"{path.name} {document}"})
            sentence = []
        elif line.startswith("-DOCSTART-") or (not sentence and line.startswith("# newdoc")):
            document += 1
        elif (sentence or line[0] != "#" or len(cells) == width) and not (skips and _EXTRA_WORD.match(line)):
            sentence.append(cells)
    if "document" in table.names and not document:
        raise DataError(f"{path}: has no -DOCSTART- or `# newdoc`, but `columns.group` is document.")
