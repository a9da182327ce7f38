"""Where a prediction and the truth differ, marked by colour, underline and a sign, so that no eye depends on
one of them: `−` true only, `+` predicted only, `=` both; where several spans overlap, the sign of each.

A text is cut wherever a span begins or ends. So each piece lies in a span as a whole or not at all, and is
marked by all spans that it lies in, however these overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup, escape

LOOKS = {"missed": "−", "spurious": "+", "both": "="}
"""CSS class -> sign. The class `mixed` is that of a piece with several signs."""


@dataclass(frozen=True)
class Piece:
    """A part of a text that no span begins or ends in."""

    text: str
    look: str = ""
    """A key of `LOOKS`, or `mixed`; empty: no span holds it."""
    sign: str = ""


def pieces(text: str, truth: Sequence[Any], predicted: Sequence[Any], *, named: bool) -> Iterator[Piece]:
    """The text, cut where spans [name, start, end], end exclusive, begin and end.

    Args:
        named: whether a sign says the names of its spans, too.
    """
    sides = [_inside(spans, len(text)) for spans in (truth, predicted)]
    cuts = sorted({0, len(text), *(at for spans in sides for _, *place in spans for at in place)})
    for start, end in pairwise(cuts):
        true, said = (
            {name for name, begin, stop in spans if begin <= start and end <= stop} for spans in sides
        )
        yield _piece(text[start:end], true, said, named)


def marked_text(text: str, truth: Sequence[Any], predicted: Sequence[Any], *, named: bool) -> Markup:
    """`pieces` as HTML; everything in the text is escaped."""
    mark = Markup('<mark class="{}"><b>{}</b>{}</mark>')
    return Markup("").join(
        mark.format(piece.look, piece.sign, piece.text) if piece.look else escape(piece.text)
        for piece in pieces(text, truth, predicted, named=named)
    )


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


def _piece(text: str, true: Collection[str], said: Collection[str], named: bool) -> Piece:
    if not true and not said:
        return Piece(text)
    missed, spurious = sorted(set(true) - set(said)), sorted(set(said) - set(true))
    both = sorted(set(true) & set(said))
    kinds = {"missed": missed, "spurious": spurious, "both": both}
    held = [look for look, names in kinds.items() if names]
    look = held[0] if len(held) == 1 else "mixed"
    signs = [f"{LOOKS[kind]}{name if named else ''}" for kind in held for name in kinds[kind]]
    sign = " ".join(dict.fromkeys(signs))
    return Piece(text, look, sign)
