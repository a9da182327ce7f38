"""A tokenised split: flat arrays over all tokens of all windows, so that they can be mapped from disk and
shared. A window is the input of the encoder: a whole text, its beginning, or one of several overlapping
pieces.

Suffixes: T tokens of all windows, special tokens included, no padding; W windows; S spans; N pairs of
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.tasks.example import Example

IntArray = NDArray[np.signedinteger[Any]]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]

LENGTH_MULTIPLE = 8
"""Batches are padded to a multiple of this where few shapes matter: on a GPU and in compiled code."""
WHOLE_TEXTS = 2**31 - 1
"""A `max_length` that cuts no text."""
BEGINS_BEFORE, ENDS_AFTER = 1, 2
_PIECE = 2**20
"""Tokens of a mapped array that are looked at at a time: NumPy counts in a copy of 64 bits."""


@dataclass(frozen=True)
class Windowing:
    """How texts are cut into windows; see `hpo.data.tokenization`."""

    max_length: int
    """Tokens of a window at most, special tokens included."""
    long_text: str = "truncate"
    """What becomes of a text that is longer: `truncate` or `window`."""
    stride: int = 0
    """Tokens that two windows of one text share, where `long_text` is `window`."""
    pair_segments: tuple[str, str] | None = None
    """Segments of an example that are encoded as a pair, in this order."""


@dataclass(frozen=True)
class WindowSpans:
    """The true spans of one task, as tokens of windows.

    Rows are (label, first token in the window, last token, cut) and come in the order of windows; those of
    window w are `rows_S4[start_W1[w] : start_W1[w + 1]]`. `cut` is a sum of BEGINS_BEFORE and ENDS_AFTER:
    a span that reaches over the window's edge is clipped to it and keeps what it is told by `cut`.
    """

    rows_S4: IntArray
    start_W1: IntArray

    def placed(self, windows_B: IntArray) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
        """Where the spans of some windows lie: of every token in one, and of the first token of each that
        begins there, which of the windows it is in, its position there, and the span's label."""
        from_B = self.start_W1[windows_B]
        count_B = self.start_W1[windows_B + 1] - from_B
        label_S, first_S, last_S, cut_S = self.rows_S4[ragged_arange(from_B, count_B)].T.astype(np.int64)
        row_S = np.repeat(np.arange(len(windows_B)), count_B)
        inside_S = last_S - first_S + 1
        span = np.repeat(np.arange(len(row_S)), inside_S)
        begins_S = (cut_S & BEGINS_BEFORE) == 0
        return (
            (row_S[span], ragged_arange(first_S, inside_S), label_S[span]),
            (row_S[begins_S], first_S[begins_S], label_S[begins_S]),
        )


@dataclass(frozen=True, kw_only=True)
class TokenizedSplit:
    """A split as the encoder reads it.

    `targets` of sequence tasks and of span_extraction are those of `hpo.tasks.kind`, one row a window, in
    small integer types; of span_per_label it is int8 [W, C], 1 for classes that hold and have evidence
    somewhere in the text. The other targets of token tasks are made from `spans` batch by batch.
    """

    examples: Sequence[Example]
    max_length: int
    input_ids_T: IntArray
    type_ids_T: IntArray | None = None
    """Segment ids of encoded pairs, where the encoder takes any."""
    char_start_T: IntArray
    char_end_T: IntArray
    """Characters of the example's text that a token stands for, without white space around them; -1 at
    special tokens."""
    owned_T: BoolArray
    """True in exactly one window for every token that is kept: the one that shows most around it."""
    window_start_W1: IntArray
    window_example_W: IntArray
    spans: Mapping[str, WindowSpans]
    targets: Mapping[str, AnyArray]
    annotated: Mapping[str, BoolArray]
    """For each task, which windows belong to rows that hold its truth."""
    num_cut_examples: int
    """Texts that were longer than a window and lost their end."""
    num_lost_spans: Mapping[str, int]
    """For each span task, the spans that no window holds whole."""
    length_multiple: int = LENGTH_MULTIPLE
    """Batches are padded to a multiple of this."""

    @property
    def num_windows(self) -> int:
        return len(self.window_example_W)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @property
    def lengths_W(self) -> IntArray:
        return np.diff(self.window_start_W1)

    @property
    def used_ids(self) -> IntArray:
        """The token ids that occur, ascending."""
        pieces = range(0, len(self.input_ids_T), _PIECE)
        used = [np.flatnonzero(np.bincount(self.input_ids_T[at : at + _PIECE])) for at in pieces]
        return np.unique(np.concatenate(used))

    @property
    def example_share_W(self) -> NDArray[np.float64]:
        """What part of its example each window is, so that those of an example sum to 1."""
        windows_E = np.bincount(self.window_example_W, minlength=len(self.examples))
        return 1 / windows_E[self.window_example_W]


def starts(count_N: IntArray) -> NDArray[np.int64]:
    """Where each run of so many numbers begins, and where the last one ends."""
    return np.append(0, np.cumsum(count_N))


def ragged_arange(start_N: IntArray, count_N: IntArray) -> NDArray[np.int64]:
    """Concatenate `arange(start, start + count)` of every pair."""
    first_N1 = starts(count_N)
    return np.repeat(start_N - first_N1[:-1], count_N) + np.arange(first_N1[-1])
