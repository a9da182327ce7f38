"""A tokenised split as flat arrays, and how those of its chunks follow each other.

Texts are stored once, as flat arrays over all tokens of all windows, so that the arrays can be mapped from
disk and shared by every worker, and a batch is a gather. A window is what the encoder sees at once: a whole
text, its beginning (truncate), or one of several overlapping pieces (window).

A large split is made and written chunk by chunk, so that no more than one chunk is in memory. A chunk counts
its examples, tokens and spans from 0; `Concatenation` counts on from the chunks before it.

Suffixes: T tokens of all windows in order, special tokens included, no padding; W windows; S spans; N pairs
of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.data.examples import Example

IntArray = NDArray[np.signedinteger[Any]]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]

LENGTH_MULTIPLE = 8
"""To a multiple of this batches are padded where few shapes matter: on a GPU and in compiled code."""
BEGINS_BEFORE, ENDS_AFTER = 1, 2
_PIECE = 2**20
"""Tokens of a mapped array that are looked at at a time: NumPy counts in a copy of 64 bits."""
_FLAT = (
    "input_ids_T",
    "type_ids_T",
    "char_start_T",
    "char_end_T",
    "owned_T",
    "window_start_W1",
    "window_example_W",
)


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


@dataclass(frozen=True)
class TokenizedSplit:
    """A split as the encoder reads it.

    `targets` of sequence tasks and of span_extraction are those of `hpo.data.tasks`, one row a window, in
    small integer types; of span_per_label it is int8 [W, C], 1 for classes that hold and have evidence
    somewhere in the text. The other targets of token tasks are made from `spans` batch by batch.
    """

    examples: Sequence[Example]
    max_length: int
    input_ids_T: IntArray
    type_ids_T: IntArray | None
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
    num_cut_examples: int = 0
    """Texts that were longer than a window and lost their end."""
    num_lost_spans: Mapping[str, int] = field(default_factory=dict)
    """For each span task, the spans that no window holds whole."""
    length_multiple: int = LENGTH_MULTIPLE
    """To a multiple of this its batches are padded."""

    @property
    def num_windows(self) -> int:
        return len(self.window_example_W)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @property
    def lengths_W(self) -> IntArray:
        """Tokens of each window, special tokens included."""
        return np.diff(self.window_start_W1)

    @property
    def used_ids(self) -> IntArray:
        """The token ids that occur, ascending."""
        pieces = range(0, len(self.input_ids_T), _PIECE)
        found = [np.flatnonzero(np.bincount(self.input_ids_T[at : at + _PIECE])) for at in pieces]
        return np.unique(np.concatenate(found))

    @property
    def example_share_W(self) -> NDArray[np.float64]:
        """What part of its example each window is, so that those of an example sum to 1."""
        windows_E = np.bincount(self.window_example_W, minlength=len(self.examples))
        return 1 / windows_E[self.window_example_W]


def ragged_arange(start_N: IntArray, count_N: IntArray) -> NDArray[np.int64]:
    """Concatenate `arange(start, start + count)` of every pair."""
    ends_N = np.cumsum(count_N)
    total = int(ends_N[-1]) if len(ends_N) else 0
    return np.repeat(start_N - (ends_N - count_N), count_N) + np.arange(total)


class Concatenation:
    """The chunks of a split, concatenated in their order.

    `next` says which arrays to append for a chunk. `totals` are the numbers of the whole split, which
    JSON can hold.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Any] = {}
        self._num_examples = 0
        self._ends: dict[str, int] = {}

    def next(self, chunk: TokenizedSplit) -> dict[str, AnyArray]:
        """The arrays of a chunk, to be appended by name to those of the chunks before it."""
        arrays = {name: array for name in _FLAT if (array := getattr(chunk, name)) is not None}
        for task, spans in chunk.spans.items():
            arrays[f"span_rows.{task}"], arrays[f"span_start.{task}"] = spans.rows_S4, spans.start_W1
        arrays |= {f"target.{task}": array for task, array in chunk.targets.items()}
        arrays |= {f"annotated.{task}": array for task, array in chunk.annotated.items()}

        example_W = arrays["window_example_W"]
        arrays["window_example_W"] = example_W + example_W.dtype.type(self._num_examples)
        for name in ("window_start_W1", *(f"span_start.{task}" for task in chunk.spans)):
            start_W1 = arrays[name]
            # The first start of a chunk is the last end of the one before.
            arrays[name] = start_W1[1:] + self._ends[name] if name in self._ends else start_W1
            self._ends[name] = self._ends.get(name, 0) + int(start_W1[-1])
        self._num_examples += len(chunk.examples)
        num_cut, num_lost = self.totals.get("num_cut_examples", 0), self.totals.get("num_lost_spans", {})
        self.totals = {
            "max_length": chunk.max_length,
            "num_cut_examples": num_cut + chunk.num_cut_examples,
            "num_lost_spans": {t: num_lost.get(t, 0) + lost for t, lost in chunk.num_lost_spans.items()},
        }
        return arrays


def split_of_arrays(
    examples: Sequence[Example], arrays: Mapping[str, AnyArray], totals: Mapping[str, Any]
) -> TokenizedSplit:
    """The split of these arrays and totals. Raises KeyError where one is not there."""

    def of_tasks(kind: str) -> dict[str, AnyArray]:
        prefix = f"{kind}."
        return {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}

    starts = of_tasks("span_start")
    flat: dict[str, Any] = {name: arrays[name] for name in _FLAT if name != "type_ids_T"}
    return TokenizedSplit(
        examples=examples,
        type_ids_T=arrays.get("type_ids_T"),
        spans={task: WindowSpans(rows, starts[task]) for task, rows in of_tasks("span_rows").items()},
        targets=of_tasks("target"),
        annotated=of_tasks("annotated"),
        max_length=totals["max_length"],
        num_cut_examples=totals["num_cut_examples"],
        num_lost_spans=totals["num_lost_spans"],
        **flat,
    )
