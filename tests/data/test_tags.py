"""Spans of tags, in each scheme and with faults."""

import random
from typing import Any

import pytest

from hpo.data.tags import spans_of_tags, tag_faults

Spans = list[tuple[str, int, int]]


def tags_of(spans: Spans, length: int, scheme: str) -> list[str]:
    """Write spans of tokens (name, first, last) as tags."""
    tags = ["O"] * length
    for name, first, last in spans:
        touches = any((other, first - 1) == (one, end) for one, _, end in spans for other in (name,))
        begin = "I" if scheme == "IOB1" and not touches else "B"
        tags[first : last + 1] = [f"{begin}-{name}", *[f"I-{name}"] * (last - first)]
        if scheme in ("BILOU", "IOBES"):
            tags[last] = f"{scheme[2] if scheme == 'BILOU' else 'E'}-{name}"
            if first == last:
                tags[first] = f"{'U' if scheme == 'BILOU' else 'S'}-{name}"
    return tags


@pytest.mark.parametrize("scheme", ["IOB1", "IOB2", "BILOU", "IOBES"])
def test_every_scheme_gives_the_planted_spans(scheme: str) -> None:
    draw = random.Random(scheme)
    for _ in range(300):
        tokens = [draw.choice(["Ann", "é", "in", "日本"]) for _ in range(draw.randint(1, 9))]
        planted: Spans = []
        at = 0
        while at < len(tokens):
            last = min(len(tokens) - 1, at + draw.randint(0, 2))
            planted += [(draw.choice("xy"), at, last)] if draw.random() < 0.6 else []
            at = last + 1
        found, counts = spans_of_tags(tokens, tags_of(planted, len(tokens), scheme), ["x", "y"])
        text, begins = " ".join(tokens), [len(" ".join([*tokens[:n], ""])) for n in range(len(tokens))]
        begins[0] = 0
        expected = {(n, begins[a], begins[b] + len(tokens[b])) for n, a, b in planted}
        assert {(name, *ends) for name, pairs in found.items() for ends in pairs} == expected, text
        assert tag_faults(counts)[0] == 0


@pytest.mark.parametrize(
    ("tags", "expected", "faults"),
    [
        # The spans are those of seqeval's documentation and of conlleval: first and last token.
        ("O O O B-M I-M I-M O", [("M", 3, 5)], 0),
        ("B-P I-L O B-L", [("P", 0, 0), ("L", 1, 1), ("L", 3, 3)], 1),
        ("O I-P I-P B-L", [("P", 1, 2), ("L", 3, 3)], 1),
        ("B-P B-P I-P", [("P", 0, 0), ("P", 1, 2)], 0),
        ("L-P U-P B-P O", [("P", 0, 0), ("P", 1, 1), ("P", 2, 2)], 2),
        ("B-P L-P I-P", [("P", 0, 1), ("P", 2, 2)], 2),
        ("I-P I-P B-P O", [("P", 0, 1), ("P", 2, 2)], 0),
        ("B I O B", [("P", 0, 1), ("P", 3, 3)], 0),
    ],
)
def test_faults_begin_a_span(tags: str, expected: Spans, faults: int) -> None:
    tokens = ["a"] * len(tags.split())
    found, counts = spans_of_tags(tokens, tags.split(), ["P"])
    spans = sorted((a // 2, name, (b - 1) // 2) for name, pairs in found.items() for a, b in pairs)
    assert [(name, first, last) for first, name, last in spans] == expected
    assert tag_faults(counts)[0] == faults


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["B-P"], "each token must have a tag, but 2 tokens have 1 tags"),
        (["P", "O"], "a tag must be `O`, or a prefix of BIO, BILOU or IOBES and a name"),
        (["B", "O"], "but got 'B'"),
        ([3, 0], "`classes` of the task may name the tags 0, 1"),
    ],
)
def test_bad_tags_are_refused(tags: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spans_of_tags(["a", "b"], tags, ["x", "y"])
