"""Tables in the form in which Excel writes them as csv."""

from __future__ import annotations


def excel(rows: list[list[str]], delimiter: str = ";", separator: str = "|") -> str:
    """As Excel writes it: CRLF, and quotes where they are needed."""

    def cell(text: str) -> str:
        if not text.startswith("["):
            text = text.replace("|", separator)
        return '"' + text.replace('"', '""') + '"' if set(text) & {delimiter, '"', "\n"} else text

    return "".join(delimiter.join(map(cell, row)) + "\r\n" for row in rows)
