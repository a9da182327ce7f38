"""Marks of the differences between a prediction and the truth: `−` true only, `+` predicted only, `=` both.
Signs, colours and underlines say the same, so that no reader depends on one of them.

A text is cut wherever a span begins or ends, so each piece lies in a span as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from hpo.tasks.kind import Span

LOOKS = {"missed": "−", "spurious": "+", "both": "="}
"""CSS class -> sign. The class `mixed` is that of a piece with several signs."""

MEANINGS = {"missed": "true only", "spurious": "predicted only", "both": "true and predicted"}
"""Of the signs, by their CSS class."""

MAX_NAMES = 3
"""Of so many spans with the same sign a piece says the names; of more, how many they are."""


@dataclass(frozen=True)
class Piece:
    """A part of a text that no span begins or ends in."""

    text: str
    look: str = ""
    """A key of `LOOKS`, or `mixed`; empty: no span holds it."""
    sign: str = ""


def pieces(text: str, truth: Sequence[Any], predicted: Sequence[Any], *, named: bool) -> Iterator[Piece]:
    """The text, cut where spans [name, start, end] begin and end; with `named`, signs have the names of the
    spans.
    """
    sides = [{(str(name), start, end) for name, start, end in spans or ()} for spans in (truth, predicted)]
    ends = {min(max(0, at), len(text)) for side in sides for _, *place in side for at in place}
    for start, end in pairwise(sorted({0, len(text), *ends})):
        true, said = ({span for span in side if span[1] <= start and end <= span[2]} for side in sides)
        yield _piece(text[start:end], true, said, named)


def marked_text(text: str, truth: Sequence[Any], predicted: Sequence[Any], *, named: bool) -> Markup:
    """`pieces` as HTML; everything in the text is escaped."""
    mark = Markup('<mark class="{}"><b>{}</b>{}</mark>')
    return Markup("").join(
        mark.format(piece.look, piece.sign, piece.text) if piece.look else escape(piece.text)
        for piece in pieces(text, truth, predicted, named=named)
    )


def marked_labels(truth: Any, predicted: Any) -> Markup:
    true, said = _labels(truth), _labels(predicted)
    looks = [
        *(("missed", name) for name in true if name not in said),
        *(("spurious", name) for name in said if name not in true),
        *(("both", name) for name in true if name in said),
    ]
    mark = Markup('<mark class="{}"><b>{}</b> {}</mark>')
    marks = [mark.format(look, LOOKS[look], name) for look, name in looks]
    return Markup(" ").join(marks) if marks else Markup("none")


def _labels(value: Any) -> list[str]:
    return [] if value is None else list(map(str, value)) if isinstance(value, list) else [str(value)]


def _piece(text: str, true: Set[Span], said: Set[Span], named: bool) -> Piece:
    if not true and not said:
        return Piece(text)
    looks = {"missed": true - said, "spurious": said - true, "both": true & said}
    kinds = {look: sorted({name for name, *_ in spans}) for look, spans in looks.items()}
    held = [look for look, names in kinds.items() if names]
    look = held[0] if len(held) == 1 else "mixed"
    signs = [sign for kind in held for sign in _signs(LOOKS[kind], kinds[kind], named)]
    return Piece(text, look, " ".join(signs))


def _signs(sign: str, names: Sequence[str], named: bool) -> list[str]:
    if not named:
        return [sign]
    rest = [f"{sign}{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return [*(f"{sign}{name}" for name in names[:MAX_NAMES]), *rest]
