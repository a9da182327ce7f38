"""Detection of spans with an end inside a word or at a space, such as offsets that are wrong by one.

Only Latin, Greek, Cyrillic and Armenian letters count. Chinese, Japanese and Thai write no spaces, and
Korean, Arabic and Hebrew write particles without a space beside a word. A change between letters and digits
(`10mg`) or from small to capital letters (`iPhone`) ends a word too. In snips, squad2, nlupp and sgd, at most
0.15 % of a name's spans end inside a word.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hpo.data.tags import tag_faults

_FEWEST, _SHARE = 3, 0.05
"""Smallest number and share of odd spans in a report."""


@dataclass
class SpanEnds:
    """Counts of one task's raw spans, with white space at their ends."""

    num_spans: int = 0
    num_odd: int = 0
    """Number of spans with an end inside a word or at a space."""
    row: str = ""
    """Id of the row of the first odd span."""
    excerpt: str = ""
    tags: Counter[str] = field(default_factory=Counter)
    """Counts of the tags that the spans come from, see `hpo.data.tags`."""

    def add(self, row_id: str, text: str, start: int, end: int) -> None:
        self.num_spans += 1
        if _is_odd(text, start, end):
            if not self.num_odd:
                around = f"{text[max(0, start - 15) : start]}[{text[start:end]}]{text[end : end + 15]}"
                self.row, self.excerpt = row_id, " ".join(around.splitlines())
            self.num_odd += 1

    def merge(self, other: SpanEnds) -> None:
        if not self.num_odd:
            self.row, self.excerpt = other.row, other.excerpt
        self.num_spans += other.num_spans
        self.num_odd += other.num_odd
        self.tags.update(other.tags)

    def warnings(self) -> list[str]:
        """Return sentences about faults of the tags, and about odd spans if there are many."""
        warnings, (num, scheme) = [], tag_faults(self.tags)
        if num:
            warnings.append(
                f"{num:,} of {self.tags['tags']:,} tags are faults of {scheme}, as `I-` without `B-`. They "
                "are read as conlleval and seqeval read: such a tag begins a span."
            )
        if self.num_odd >= max(_FEWEST, _SHARE * self.num_spans):
            percent = 100 * self.num_odd / self.num_spans
            warnings.append(
                f"{self.num_odd:,} of {self.num_spans:,} spans ({percent:.1f} %) begin or end inside a word "
                f"or at a space, as in `{self.excerpt}` (row `{self.row}`). Offsets must count characters "
                "from 0, and the end is one past the last character."
            )
        return warnings


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
