"""Numbers in text. A mark in one cell may be that of decimals or of thousands, so the column decides.

`7,800` is 7800 or 7.8. Beside `1,25` the comma is that of decimals, beside `1,234,567` or `0.5` it is not.
Thousands may have a comma, a point, an apostrophe or a space. Digits may be those of any script. `1_03`, `007`
and `12%` are no numbers: they may be codes, or hundredths.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hpo.errors import DataError

NumberText = tuple[str, str, Mapping[str, float]]
"""A task, the text in its cell, and the number by the mark of decimals."""

_ASCII = str.maketrans("\u2212\u2013\ufe63\uff0d\uff0b\uff0e\uff0c\u066b\u066c\u2019", "----+.,.''")
_FORMS = {
    mark: re.compile(
        rf"(?![-+]?0\d+$)([-+]?)(\d+|(?!0)\d{{1,3}}({thousands})\d{{3}}(?:\3\d{{3}})*|(?={mark}\d))"
        rf"({mark}\d*)?(e[-+]?\d+)?",
        re.IGNORECASE,
    )
    for mark, thousands in ((r"\.", r"[,'\s]"), (",", r"[.'\s]"))
}


@lru_cache(maxsize=4096)
def readings(text: str, *, has_decimal_comma: bool) -> Mapping[str, float]:
    """Return the number by the mark of decimals, `.` or `,`, with the marks that fit; the usual one first."""
    plain = text.strip().translate(_ASCII)
    found: dict[str, float] = {}
    for mark, form in _FORMS.items():
        if match := form.fullmatch(plain):
            sign, whole, _, decimals, exponent = match.groups("")
            digits = re.sub(r"\D", "", whole) + decimals.replace(",", ".")
            found[mark[-1]] = float(f"{sign}{digits}{exponent}")
    if not has_decimal_comma and "." not in found:
        return {}
    if not has_decimal_comma and "," not in plain:
        found.pop(",", None)
    return found


class NumberColumn:
    """The numbers in text of one task, in all splits."""

    def __init__(self) -> None:
        self._sure: dict[str, str] = {}
        """By mark, the first number that only this mark fits, with its location."""
        self._unsure: list[tuple[str, Mapping[str, float], Any]] = []

    def add(self, number: NumberText, where: str, labels: Any) -> None:
        """Add a number; the decision changes the labels of its row."""
        _, text, found = number
        shown = f"`{text.strip()}` ({where})"
        if len(found) == 1:
            self._sure.setdefault(next(iter(found)), shown)
        elif found["."] != found[","]:
            self._unsure.append((shown, found, labels))

    def decide(self, task: str, given: str | None) -> None:
        """Give all labels one reading; `given` is the mark of decimals, if known. Raises DataError."""
        marks = [given] if given else [*self._sure, "."]
        other = {mark: shown for mark, shown in self._sure.items() if mark != marks[0]}
        for mark, shown in other.items():
            first = (
                f"`data.csv.decimal` is `{given}`"
                if given
                else f"in {self._sure[marks[0]]} it is `{marks[0]}`"
            )
            raise DataError(
                f"labels.{task}: the mark of decimals must be one, but in {shown} it is `{mark}`, and {first}."
            )
        for shown, found, labels in self._unsure:
            if len(marks) == 1 and not given:
                raise DataError(
                    f"labels.{task}: {shown} is {found['.']:.15g} or {found[',']:.15g}, and no number of the "
                    "column tells which. Set `data.csv.decimal` to `.` or `,`, or write no mark of thousands."
                )
            labels[task] = found[marks[0]]
