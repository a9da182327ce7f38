"""Spans of tagged tokens, in every scheme of BIO.

The prefix of a tag such as `B-PER` is B (begin), I or M (inside), L or E (last), or U, S or W (unit). A token
continues a span if its prefix is I or L, and the token before has the same name and the prefix B or I. Every
other token with a name begins a span, as in conlleval, and in seqeval without its mode `strict`.

In IOB1, B stands only between two spans of one name. Tags without another B, L or U count as IOB1.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from hpo.errors import shorten
from hpo.tasks.example import Offsets

_TAG = re.compile(r"([BIMLEUSW])(?:[-_](.+))?|O", re.DOTALL)
_PREFIX = {"M": "I", "E": "L", "S": "U", "W": "U"}


def spans_of_tags(
    tokens: Sequence[str], tags: Sequence[Any], names: Sequence[str]
) -> tuple[dict[str, list[Offsets]], Counter[str]]:
    """Return the spans of characters by name, and the counts for `tag_faults`.

    A tag such as `B` has the only one of `names`. Raises ValueError for other tags, or if a token has none.
    """
    name = names[0] if len(names) == 1 else None
    if len(tags) != len(tokens):
        raise ValueError(f"each token must have a tag, but {len(tokens)} tokens have {len(tags)} tags")
    spans: dict[str, list[Offsets]] = {}
    counts = Counter[str](tags=len(tags))
    before: tuple[str, str | None] = ("O", None)
    ends = accumulate(len(token) + 1 for token in tokens)
    for token, end, tag in zip(tokens, ends, tags, strict=True):
        match = _TAG.fullmatch(tag) if isinstance(tag, str) else None
        if match is None or (tag != "O" and not (match[2] or name)):
            known = "`O`, or a prefix of BIO, BILOU or IOBES and a name, as in `B-PER`"
            hint = " `classes` of the task may name the tags 0, 1, ..." if isinstance(tag, int) else ""
            raise ValueError(f"a tag must be {known}, but got {shorten(repr(tag), 60)}.{hint}")
        now = (_PREFIX.get(tag[0], tag[0]), match[2] or name if match[1] else None)
        continues = now[0] in "IL" and before[0] in "BI" and now[1] == before[1]
        counts["no begin"] += now[0] in "IL" and not continues
        counts["no end"] += before[0] in "BI" and not continues
        counts["only IOB2"] += now[0] == "B" and now[1] != before[1]
        counts["closed"] += now[0] in "LU"
        if now[1] is not None:
            of_name = spans.setdefault(now[1], [])
            of_name.append((of_name.pop()[0] if continues else end - 1 - len(token), end - 1))
        before = now
    counts["no end"] += before[0] in "BI"
    return spans, counts


def tag_faults(counts: Mapping[str, int]) -> tuple[int, str]:
    """Return the number of faults of a task's tags, and the name of their scheme."""
    if counts.get("closed"):
        return counts["no begin"] + counts["no end"], "BILOU or IOBES"
    return (counts["no begin"], "BIO (IOB2)") if counts.get("only IOB2") else (0, "IOB1")
