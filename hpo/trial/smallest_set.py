"""The smallest set of things that makes something hold, found by asking of sets whether it holds for them.

A single one is looked for first. Else all together are reduced by delta debugging (ddmin, Zeller and
Hildebrandt 2002, doi 10.1109/32.988498): no single one of what it leaves can be left out, though another set
might have fewer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

Names = tuple[str, ...]


def smallest_set(units: Names, singles: Iterable[str], is_ok: Callable[[Names], bool]) -> Names:
    """The first of `singles` that suffices alone; else a subset of `units`, of which none can be left out.

    `units` must be ok together.
    """
    single = next(((one,) for one in singles if is_ok((one,))), None)
    return single or _ddmin(units, is_ok)


def _ddmin(units: Names, is_ok: Callable[[Names], bool]) -> Names:
    """A subset that is ok and of which no single unit can be left out; `units` are ok, singles are not."""
    num_chunks = 2
    while len(units) > 2:
        chunks = _cut(units, num_chunks)
        rests = [tuple(unit for unit in units if unit not in chunk) for chunk in chunks]
        tried = (each for each in (*chunks, *rests) if 1 < len(each) < len(units))
        smaller = next(filter(is_ok, tried), None)
        if smaller is not None:
            num_chunks = 2 if smaller in chunks else max(num_chunks - 1, 2)
            units = smaller
        elif num_chunks < len(units):
            num_chunks = min(2 * num_chunks, len(units))
        else:
            break
    return units


def _cut(units: Sequence[str], num_chunks: int) -> list[Names]:
    ends = [len(units) * index // num_chunks for index in range(num_chunks + 1)]
    return [tuple(units[start:end]) for start, end in itertools.pairwise(ends)]
