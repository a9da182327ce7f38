"""A tokenised split: flat arrays over all tokens of all windows, for sharing by memory maps.

A window is the input of the encoder: a whole text, its beginning, or one of several overlapping pieces.

Suffixes: T tokens of all windows with special tokens, without padding; W windows; S spans; N pairs of
numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.tasks.example import Example

IntArray = NDArray[np.signedinteger[Any]]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]

"""Multiple of padded lengths, for few shapes on a GPU and in compiled code."""
WHOLE_TEXTS = 2**31 - 1
"""A `max_length` without any cut."""
BEGINS_BEFORE, ENDS_AFTER = 1, 2
_PIECE = 2**20
"""Number of tokens of a mapped array in one count: NumPy counts in a copy of 64 bits."""


@dataclass(frozen=True)
class Windowing:
    """Settings of the cut of texts into windows; see `hpo.data.tokenization`."""

    max_length: int
    """Largest number of tokens of a window, with special tokens."""
    long_text: str = "truncate"
    """Cut of a longer text: `truncate` or `window`."""
    stride: int = 0
    """Number of common tokens of two windows of one text, with `long_text: window`."""
    pair_segments: tuple[str, str] | None = None
    """Segments of an example to encode as a pair, in this order."""


@dataclass(frozen=True)
class WindowSpans:
    """The true spans of one task, as tokens of windows.

    Rows are (label, first token in the window, last token, cut) in the order of windows; window w has the
    rows `rows_S4[start_W1[w] : start_W1[w + 1]]`. A span over the window's edge is clipped to it; `cut` is a
    sum of BEGINS_BEFORE and ENDS_AFTER.
    """

    rows_S4: IntArray
    start_W1: IntArray

    def placed(self, windows_B: IntArray) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
        """Return the tokens inside spans of some windows, and the first tokens of spans that begin there: the
        number of the window, the position in it, and the span's label."""
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
    """A split in tokens.

    `targets` of sequence tasks and of span_extraction have the layout of `hpo.tasks.kind`, one row for each
    window, in small integer types. The target of span_per_label is int8 [W, C], 1 for classes with evidence
    in the text. Other token tasks get their targets from `spans` for each batch.
    """

    examples: Sequence[Example]
    max_length: int
    input_ids_T: IntArray
    type_ids_T: IntArray | None = None
    """Segment ids of encoded pairs, if the encoder has any."""
    char_start_T: IntArray
    char_end_T: IntArray
    """Characters of a token in the example's text, without outer white space; -1 at special tokens."""
    owned_T: BoolArray
    """True in exactly one window for every token: the window with most context around it."""
    window_start_W1: IntArray
    window_example_W: IntArray
    spans: Mapping[str, WindowSpans]
    targets: Mapping[str, AnyArray]
    annotated: Mapping[str, BoolArray]
    """For each task, a mask of the windows of annotated rows."""
    num_cut_examples: int
    """Number of texts without their end, since they are longer than a window."""
    num_lost_spans: Mapping[str, int]
    """For each span task, the number of spans not whole in any window."""
    has_few_lengths: bool = True
    """Round padded lengths up (`padded_length`)."""

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
        """The occurring token ids, ascending."""
        pieces = range(0, len(self.input_ids_T), _PIECE)
        used = [np.flatnonzero(np.bincount(self.input_ids_T[at : at + _PIECE])) for at in pieces]
        return np.unique(np.concatenate(used))

    @property
    def example_share_W(self) -> NDArray[np.float64]:
        """Share of each window in its example; the shares of an example sum to 1."""
        windows_E = np.bincount(self.window_example_W, minlength=len(self.examples))
        return 1 / windows_E[self.window_example_W]


def starts(count_N: IntArray) -> NDArray[np.int64]:
    """Return the first position of each run of `count_N` numbers, and the end of the last run."""
    return np.append(0, np.cumsum(count_N))


def ragged_arange(start_N: IntArray, count_N: IntArray) -> NDArray[np.int64]:
    """Concatenate `arange(start, start + count)` of every pair."""
    first_N1 = starts(count_N)
    return np.repeat(start_N - first_N1[:-1], count_N) + np.arange(first_N1[-1])
