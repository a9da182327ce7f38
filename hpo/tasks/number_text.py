"""Numbers in text: which mark is that of decimals. All numbers of a column have one reading."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hpo.errors import DataError

NumberText = tuple[str, str, Mapping[str, float]]

_ASCII = str.maketrans("\u2212\u2013\ufe63\uff0d\uff0b\uff0e\uff0c\u066b\u066c\u2019", "----+.,.''")
_FORMS = {
    mark: re.compile(
        rf"(?i)(?![-+]?0\d+$)([-+]?(?:\d+|(?!0)\d{{1,3}}({group})\d{{3}}(?:\2\d{{3}})*|(?={mark}\d)))"
        rf"({mark}\d*)?(e[-+]?\d+)?"
    )
    for mark, group in ((r"\.", r"[,'\s]"), (",", r"[.'\s]"))
}


@lru_cache(maxsize=4096)
def readings(text: str, *, has_decimal_comma: bool) -> Mapping[str, float]:
    """Return the number by the mark of decimals, `.` or `,`, with the marks that fit; the usual one first."""
    plain = text.strip().translate(_ASCII)
    found: dict[str, float] = {}
    for mark, form in _FORMS.items():
        if match := form.fullmatch(plain):
            whole, _, decimals, exponent = match.groups("")
            found[mark[-1]] = float(re.sub(r"[^\d+-]", "", whole) + decimals.replace(",", ".") + exponent)
    is_point = not has_decimal_comma and ("." not in found or ("." in plain and "," not in plain))
    return {mark: value for mark, value in found.items() if mark == "." or not is_point}


def give_one_reading(task: str, numbers: Mapping[str, tuple[str, Mapping[str, float], Any]]) -> None:
    """Set the labels of rows to one reading of a column. Raises DataError.

    `numbers` have text, readings and labels; the first with one reading alone is under its mark.
    """
    wrong = f"labels.{task}: the mark of decimals must be the same in all numbers"
    sure = [mark for mark in ".," if mark in numbers]
    if len(sure) == 2:
        raise DataError(f"{wrong}, but {numbers['.'][0]} has `.` and {numbers[','][0]} has `,`.")
    for shown, found, labels in numbers.values():
        if not sure:
            two = f"{shown} is {found['.']:.15g} or {found[',']:.15g}"
            raise DataError(f"{wrong}, but {two}, and no number tells which. Write no mark of thousands.")
        labels[task] = found[sure[0]]
