"""Marks of the differences between a prediction and the truth: `−` true only, `+` predicted only, `=` both.
Signs, colours and underlines say the same, so that no reader depends on one of them.

A text is cut wherever a span begins or ends, so each piece lies in a span as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
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

_MARK = Markup('<mark class="{}"><b>{}</b>{}</mark>')


def marked_text(text: str, truth: Sequence[Any], predicted: Sequence[Any], *, named: bool) -> Markup:
    """Return a text as HTML, with marks where spans [name, start, end] lie. Everything in it is escaped.

    With `named`, signs have the names of the spans.
    """
    sides = [{(str(name), start, end) for name, start, end in spans or ()} for spans in (truth, predicted)]
    ends = {min(max(0, at), len(text)) for side in sides for _, *place in side for at in place}
    marked = []
    for start, end in pairwise(sorted({0, len(text), *ends})):
        true, said = ({span for span in side if span[1] <= start and end <= span[2]} for side in sides)
        marked.append(_marked(text[start:end], true, said, named))
    return Markup("").join(marked)


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


def _marked(text: str, true: Set[Span], said: Set[Span], named: bool) -> Markup:
    looks = {"missed": true - said, "spurious": said - true, "both": true & said}
    kinds = {look: sorted({name for name, *_ in spans}) for look, spans in looks.items() if spans}
    if not kinds:
        return escape(text)
    signs = [sign for kind, names in kinds.items() for sign in _signs(LOOKS[kind], names, named)]
    return _MARK.format(next(iter(kinds)) if len(kinds) == 1 else "mixed", " ".join(signs), text)


def _signs(sign: str, names: Sequence[str], named: bool) -> list[str]:
    if not named:
        return [sign]
    rest = [f"{sign}{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return [*(f"{sign}{name}" for name in names[:MAX_NAMES]), *rest]
