"""Rows that are one piece of evidence, against plain sets of words and planted copies."""

import random
from itertools import combinations

import pytest

from hpo.data.groups import evidence_groups, groups_of
from hpo.tasks.example import Example

WORDS = [f"word{number}" for number in range(5000)]


def groups_of_texts(*texts: str) -> list[int]:
    return evidence_groups(texts, [None] * len(texts))


def words(num: int, seed: int = 0) -> list[str]:
    return random.Random(seed).choices(WORDS, k=num)


def changed(text: list[str], *positions: int) -> str:
    return " ".join("other" if at in positions else word for at, word in enumerate(text))


def test_groups_equal_texts_and_chains_of_them_are_one_piece() -> None:
    texts = ["One two.", "b", "ONE  two.\n", "c", "d", "one two", "", " ", "e"]
    groups = ["", "g", None, "g", "0", None, None, "", "g"]
    assert evidence_groups(texts, groups) == [0, 1, 0, 1, 2, 3, 4, 5, 1]
    assert evidence_groups(["a", "b", "a"], ["x", "x", "y"]) == [0, 0, 0]
    assert evidence_groups(["a", "b", "c"], ["x", "y", "x"]) == [0, 1, 0]
    assert evidence_groups([], []) == []
    with pytest.raises(ValueError, match="zip"):
        evidence_groups(["a"], [])


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (" ".join(words(60)), changed(words(60), 30)),
        (" ".join(words(60)), " ".join(["Intro:", *words(60), "The", "end!"])),
        (" ".join(words(20)), ", ".join(words(20)).upper() + "!!!"),
        (" ".join(words(20)), " ".join(words(24))),
        ("".join(chr(0x4E00 + n) for n in range(80)), "".join(chr(0x4E00 + n) for n in range(75)) + "。"),
    ],
)
def test_near_duplicates_are_one_piece(text: str, other: str) -> None:
    assert groups_of_texts(text, "between", other) == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("My order 123 is late", "My order 456 was cancelled"),
        ("This film is good", "This film is not good"),
        ("play jazz on spotify", "play rock on spotify"),
        ("it is good, is it", "it is good, is it?!"),
        (" ".join(words(19)), ", ".join(words(19))),
        (" ".join(words(20)), " ".join(words(25))),
        (" ".join(words(60)), changed(words(60), 20, 40)),
        (" ".join(words(60)), changed(words(60), *range(0, 60, 5))),
        (" ".join(words(60)), " ".join(reversed(words(60)))),
    ],
)
def test_other_texts_stay_apart(text: str, other: str) -> None:
    assert groups_of_texts(text, other) == [0, 1]


def test_groups_of_a_split_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Example(str(n), f"text {n // 2}", {}, {}, group="a" * (n > 2)) for n in range(5)]
    assert groups_of(rows) == [0, 0, 1, 1, 1]
    groups_of(rows).clear()
    monkeypatch.setattr("hpo.data.groups._near_duplicates", None)
    assert groups_of([*rows]) == [0, 0, 1, 1, 1]
    with pytest.raises(TypeError):
        groups_of(rows[1:])


def test_rows_far_apart_are_compared() -> None:
    texts = [" ".join(words(30, seed)) for seed in range(2100)]
    texts[2080] = f"{texts[7]}!"
    assert groups_of_texts(*texts) == [*range(2080), 7, *range(2080, 2099)]


def test_a_template_joins_no_texts() -> None:
    texts = [f"{changed(words(100), 50)} {number} {' '.join(words(3))}" for number in range(80)]
    assert groups_of_texts(*texts) == [*range(80)]
    assert groups_of_texts(*texts[:51]) == [*range(51)]
    assert groups_of_texts(*texts[:50]) == [0] * 50
    own = [" ".join([text, *words(40, seed)]) for seed, text in enumerate(texts, start=1)]
    assert groups_of_texts(*own, own[7] + " more") == [*range(80), 7]


def test_pairs_are_those_of_sets_of_shingles() -> None:
    draw = random.Random(1)
    texts = []
    for seed in range(60):
        base = words(draw.randint(15, 120), seed)
        texts += [changed(base, *draw.sample(range(len(base)), draw.randint(0, 4))) for _ in range(4)]
    texts = list(dict.fromkeys(texts))
    shingles = [{tuple(text.split()[at : at + 5]) for at in range(len(text.split()) - 4)} for text in texts]
    root = [*range(len(texts))]
    for a, b in combinations(range(len(texts)), 2):
        both, either = shingles[a] & shingles[b], shingles[a] | shingles[b]
        if min(len(shingles[a]), len(shingles[b])) >= 16 and len(both) / len(either) >= 0.8:
            root = [root[a] if one == root[b] else one for one in root]
    numbers: dict[int, int] = {}
    expected = [numbers.setdefault(one, len(numbers)) for one in root]
    assert 60 < len(numbers) < len(texts)
    assert groups_of_texts(*texts) == expected
