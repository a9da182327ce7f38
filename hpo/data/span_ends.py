"""Detection of spans with an end inside a word or at a space, such as offsets that are wrong by one.

Only Latin, Greek, Cyrillic and Armenian letters count. Chinese, Japanese and Thai write no spaces, and
Korean, Arabic and Hebrew write particles without a space beside a word. A change between letters and digits
(`10mg`) or from small to capital letters (`iPhone`) ends a word too. In snips, squad2, nlupp and sgd, at most
0.15 % of a name's spans end inside a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hpo.tasks.example import Offsets

MAX_KEPT = 200
"""Largest number of odd spans for the search of their cause."""
_FEWEST, _SHARE = 3, 0.05
"""Smallest number and share of odd spans in a report."""


def _decoded(encoding: str, unit: int) -> Callable[[str, int, int], Offsets]:
    def offsets(text: str, start: int, end: int) -> Offsets:
        content = text.encode(encoding)
        before, inside = (content[: unit * at].decode(encoding, "ignore") for at in (start, end))
        return len(before), len(inside)

    return offsets


_CAUSES: dict[str, Callable[[str, int, int], Offsets]] = {
    # An encoding fits by chance less often than an offset of one, so it comes first.
    "offsets count bytes of UTF-8: count characters instead": _decoded("utf-8", 1),
    "offsets count UTF-16 units, as JavaScript and Java do: count code points instead": _decoded(
        "utf-16-le", 2
    ),
    "the end is the last character of the span: add 1 to each end": lambda _, start, end: (start, end + 1),
    "offsets are counted from 1: subtract 1 from each": lambda _, start, end: (start - 1, end - 1),
    "offsets are one too small: add 1 to each": lambda _, start, end: (start + 1, end + 1),
    "starts are counted from 1: subtract 1 from each start": lambda _, start, end: (start - 1, end),
}


@dataclass(frozen=True)
class OddSpans:
    """Many spans of one task with an end inside a word or at a space."""

    num_spans: int
    """Number of all spans of the task."""
    num_odd: int
    row: str
    """Id of the first odd span's row."""
    excerpt: str
    """Text around the first odd span, which is in brackets."""
    cause: str | None
    """The mistake behind most of them, with its remedy."""

    def __str__(self) -> str:
        share = f"{self.num_odd:,} of {self.num_spans:,} spans ({100 * self.num_odd / self.num_spans:.1f} %)"
        where = f"as in `{self.excerpt}` (row `{self.row}`)"
        cause = f"Probably {self.cause}." if self.cause else "Check the offsets, unless words may be divided."
        return f"{share} begin or end inside a word or at a space, {where}. {cause}"


@dataclass
class SpanEnds:
    """Counts of one task's raw spans, with white space at their ends."""

    num_spans: int = 0
    num_odd: int = 0
    kept: list[tuple[str, str, int, int]] = field(default_factory=list)
    """Row id, text, start and end of the first odd spans."""

    def add(self, row_id: str, text: str, start: int, end: int) -> None:
        self.num_spans += 1
        if _is_odd(text, start, end):
            self.num_odd += 1
            if len(self.kept) < MAX_KEPT:
                self.kept.append((row_id, text, start, end))

    def merge(self, other: SpanEnds) -> None:
        self.num_spans += other.num_spans
        self.num_odd += other.num_odd
        self.kept = [*self.kept, *other.kept][:MAX_KEPT]

    def odd(self) -> OddSpans | None:
        """Return the odd spans, if they are many."""
        if self.num_odd < max(_FEWEST, _SHARE * self.num_spans):
            return None
        row_id, text, start, end = self.kept[0]
        excerpt = f"{text[max(0, start - 15) : start]}[{text[start:end]}]{text[end : end + 15]}"
        fits = {cause: self._num_explained(corrected) for cause, corrected in _CAUSES.items()}
        best = max(fits, key=fits.__getitem__)
        cause = best if fits[best] >= 0.8 * len(self.kept) else None
        return OddSpans(self.num_spans, self.num_odd, row_id, " ".join(excerpt.splitlines()), cause)

    def _num_explained(self, corrected: Callable[[str, int, int], Offsets]) -> int:
        spans = [(text, *corrected(text, start, end)) for _, text, start, end in self.kept]
        return sum(
            0 <= start < end <= len(text) and not _is_odd(text, start, end) for text, start, end in spans
        )


def _is_odd(text: str, start: int, end: int) -> bool:
    at_space = text[start].isspace() or text[end - 1].isspace()
    return at_space or _is_inside_word(text, start) or _is_inside_word(text, end)


def _is_inside_word(text: str, at: int) -> bool:
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    kind = _kind(before)
    return kind is not None and kind == _kind(after) and not (before.islower() and after.isupper())


def _kind(character: str) -> str | None:
    code = ord(character)
    if code >= 0x590 and not 0x1E00 <= code < 0x2000:
        return None
    if character.isdigit():
        return "digit"
    return "letter" if character.isalpha() or 0x300 <= code < 0x370 else None
