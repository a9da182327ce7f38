"""Where a prediction and the truth differ, marked by colour, underline and a sign, so that no eye depends on
one of them: `−` true only, `+` predicted only, `=` both; where several spans overlap, the sign of each.

A text is cut wherever a span begins or ends. So each piece lies in a span as a whole or not at all, and is
marked by all spans that it lies in, however these overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

LOOKS = {"missed": "−", "spurious": "+", "both": "="}
"""CSS class -> sign. The class `mixed` is that of a piece with several signs."""


def marked_text(text: str, truth: Sequence[Any], predicted: Sequence[Any], *, named: bool) -> Markup:
    """The text with marks for spans [name, start, end], end exclusive; everything in it is escaped.

    Args:
        named: whether a mark says the names of its spans, too.
    """
    sides = [_inside(spans, len(text)) for spans in (truth, predicted)]
    ends = {0, len(text), *(at for spans in sides for _, *place in spans for at in place)}
    cuts = sorted(ends)
    pieces = []
    for start, end in pairwise(cuts):
        true, said = (
            {name for name, begin, stop in spans if begin <= start and end <= stop} for spans in sides
        )
        pieces.append(_piece(text[start:end], true, said, named))
    return Markup("").join(pieces)


def marked_labels(truth: Any, predicted: Any) -> Markup:
    """The classes of a row that are true, predicted or both."""
    true, said = _labels(truth), _labels(predicted)
    found = [
        *(("missed", name) for name in true if name not in said),
        *(("spurious", name) for name in said if name not in true),
        *(("both", name) for name in true if name in said),
    ]
    mark = Markup('<mark class="{}"><b>{}</b> {}</mark>')
    marks = [mark.format(look, LOOKS[look], name) for look, name in found]
    return Markup(" ").join(marks) if marks else Markup("none")


def _labels(value: Any) -> list[str]:
    return [] if value is None else list(map(str, value)) if isinstance(value, list) else [str(value)]


def _inside(spans: Sequence[Any], length: int) -> list[tuple[str, int, int]]:
    cut = ((str(name), max(0, start), min(end, length)) for name, start, end in spans or ())
    return [(name, start, end) for name, start, end in cut if start < end]


def _piece(text: str, true: Collection[str], said: Collection[str], named: bool) -> Markup:
    if not true and not said:
        return Markup("{}").format(text)
    missed, spurious = sorted(set(true) - set(said)), sorted(set(said) - set(true))
    both = sorted(set(true) & set(said))
    kinds = {"missed": missed, "spurious": spurious, "both": both}
    held = [look for look, names in kinds.items() if names]
    look = held[0] if len(held) == 1 else "mixed"
    signs = [f"{LOOKS[kind]}{name if named else ''}" for kind in held for name in kinds[kind]]
    sign = " ".join(dict.fromkeys(signs))
    return Markup('<mark class="{}"><b>{}</b>{}</mark>').format(look, sign, text)
