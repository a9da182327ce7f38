"""Rows of one split that are one piece of evidence: rows of one group, repeated texts and near duplicates.

Texts are equal if they differ in case and white space alone. They are near duplicates if their shingles (runs
of 5 words, without case and punctuation) have a Jaccard similarity of at least 0.8: one changed word in 49,
or one added word in five at an end. (Lee et al. 2022, Deduplicating Training Data Makes Language Models
Better, approximate this measure; here it is exact.)

Shingles in over 50 different texts are those of a template, and do not count: so the work is about linear in
the number of rows. A text with fewer than 16 other shingles (20 words) has no near duplicates: short texts
that differ by a number or a negation stay apart.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from hpo.tasks.example import Example

_LENGTH, _SIMILARITY, _FEWEST, _TEMPLATE = 5, 0.8, 16, 50
"""Words of a shingle, smallest similarity, smallest number of counted shingles, most texts with a shingle."""
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Thai, Burmese, Khmer, Japanese, Chinese: no spaces between words, so each character is one."""
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")
_ROWS = 1024
"""Number of texts in one matrix product, for the memory."""


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def text_keys(texts: Iterable[str]) -> NDArray[np.int64]:
    """Return a hash of each text: equal texts have equal ones, in this process."""
    return np.fromiter((hash(normalised(text)) for text in texts), dtype=np.int64)


def groups_of(examples: Sequence[Example]) -> list[int]:
    """Return `evidence_groups` of the rows of a split."""
    rows = list(examples)
    return evidence_groups([row.text for row in rows], [row.group for row in rows])


def evidence_groups(texts: Sequence[str], groups: Sequence[str | None]) -> list[int]:
    """Return a number for each row, counted from 0 in the order of rows: rows that belong together have one.

    They have an equal group, equal or near-duplicate texts, or a chain of such rows between them. A blank
    text is equal to no other, and a group "" is none. The numbers of the last splits are kept.
    """
    return list(_numbered(tuple(texts), tuple(groups)))


@lru_cache(maxsize=4)
def _numbered(texts: Sequence[str], groups: Sequence[str | None]) -> Sequence[int]:
    first: dict[int | str, int] = {}
    pairs: list[tuple[int, int]] = []
    for row, (key, text, group) in enumerate(zip(text_keys(texts).tolist(), texts, groups, strict=True)):
        pairs += [(row, first.setdefault(key, row))] if text.strip() else []
        pairs += [(row, first.setdefault(group, row))] if group else []
    different = sorted({first[key] for key in first if isinstance(key, int)})
    pairs += [(different[a], different[b]) for a, b in _near_duplicates([texts[row] for row in different])]
    a_P, b_P = np.array(pairs, np.intp).reshape(-1, 2).T
    graph = coo_array((np.ones(len(pairs), bool), (a_P, b_P)), shape=(len(texts), len(texts)))
    _, group_R = connected_components(graph, directed=False)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(group, len(numbers)) for group in group_R.tolist()]


def _near_duplicates(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of near duplicates of different texts."""
    shingles_TS = _counted_shingles(texts)
    size_T = np.diff(shingles_TS.indptr)
    by_shingle_ST = shingles_TS.T.tocsr()
    for begin in range(0, len(texts), _ROWS):
        shared = (shingles_TS[begin : begin + _ROWS] @ by_shingle_ST).tocoo()
        a_P, b_P = shared.row + begin, shared.col
        is_near_P = shared.data >= _SIMILARITY * (size_T[a_P] + size_T[b_P] - shared.data)
        is_near_P &= np.minimum(size_T[a_P], size_T[b_P]) >= _FEWEST
        yield from zip(a_P[is_near_P].tolist(), b_P[is_near_P].tolist(), strict=True)


def _counted_shingles(texts: Sequence[str]) -> csr_array:
    """Return a matrix [texts, shingles] of ones, without the shingles of templates."""
    numbers = defaultdict[str, int](count().__next__)
    words = [[*map(numbers.__getitem__, _WORD.findall(text.casefold()))] for text in texts]
    text_W = np.repeat(np.arange(len(texts)), [len(of) for of in words])
    word_W = np.fromiter(chain.from_iterable(words), np.uint64)
    num = max(0, len(word_W) - _LENGTH + 1)
    hash_W = np.zeros(num, np.uint64)
    for at in range(_LENGTH):  # a multiplication and a shift mix the bits, as in splitmix64
        hash_W = (hash_W ^ (word_W[at : at + num] + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
        hash_W ^= hash_W >> np.uint64(29)
    is_inside_W = text_W[:num] == text_W[len(word_W) - num :]
    shingles, shingle_W = np.unique(hash_W[is_inside_W], return_inverse=True)
    shape = (len(texts), len(shingles))
    ones = csr_array((np.ones(len(shingle_W), np.int32), (text_W[:num][is_inside_W], shingle_W)), shape=shape)
    ones.sum_duplicates()
    ones.data[:] = np.bincount(ones.indices, minlength=len(shingles))[ones.indices] <= _TEMPLATE
    ones.eliminate_zeros()
    return ones
