"""How long the texts are in tokens, and what a `max_length` cuts off.

Every split is tokenised once, whole; where windows of any length begin and end, and which spans no window
holds, follows from that by the rule that cuts them for training (`hpo.data.tokenization.cut_windows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpo.data.dataset import DataSet
from hpo.data.token_cache import load_tokenized
from hpo.data.token_stream import probe_layout
from hpo.data.tokenization import cut_windows
from hpo.data.tokenized_split import (
    WHOLE_TEXTS,
    IntArray,
    TokenizedSplit,
    Windowing,
    WindowSpans,
    ragged_arange,
    starts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class CutFacts:
    """What texts lose at one `max_length`; mappings are by split."""

    max_length: int
    num_over: Mapping[str, int]
    """Texts that do not fit into one window."""
    num_windows: Mapping[str, int]
    num_lost_spans: Mapping[str, Mapping[str, int]]
    """By task: the spans that no window holds whole."""


@dataclass(frozen=True)
class LengthFacts:
    """The lengths of texts in tokens, special tokens included; mappings are by split."""

    num_texts: Mapping[str, int]
    num_tokens: Mapping[str, int]
    quantiles: Mapping[str, Sequence[int]]
    """101 lengths: that of the shortest text, those that 1 %, 2 % ... of the texts do not exceed."""
    num_spans: Mapping[str, Mapping[str, int]]
    """By task."""
    cuts: Sequence[CutFacts]
    """By `max_length`, the smallest first."""


def length_facts(
    dataset: DataSet,
    tokenizer: PreTrainedTokenizerBase,
    windowings: Sequence[Windowing],
    cache_dir: Path,
) -> LengthFacts:
    """Tokenise the data set, or take it from the cache, and cut it by each of `windowings`, which may differ
    in length and stride.

    Raises what `hpo.data.token_cache.load_tokenized` raises.
    """
    pair = windowings[0].pair_segments
    whole = Windowing(WHOLE_TEXTS, pair_segments=pair)
    layout = probe_layout(tokenizer, pair is not None)
    num_before, num_between, _ = (int(count) for count in layout.special.count_E)
    num_special = len(layout.special.ids_T)
    num_tokens: dict[str, int] = {}
    quantiles: dict[str, list[int]] = {}
    num_spans: dict[str, dict[str, int]] = {}
    over: list[dict[str, int]] = [{} for _ in windowings]
    num_windows: list[dict[str, int]] = [{} for _ in windowings]
    lost: list[dict[str, dict[str, int]]] = [{} for _ in windowings]
    for name in dataset.splits:
        split = load_tokenized(dataset, name, tokenizer, whole, cache_dir)
        length_E = split.lengths_W
        num_tokens[name] = split.num_tokens
        quantiles[name] = np.percentile(length_E, range(101), method="inverted_cdf").astype(int).tolist()
        num_first_E = _num_first(split, num_before) if pair else np.zeros_like(length_E)
        num_second_E = length_E - num_special - num_first_E
        second_at_E = num_before + num_first_E + num_between
        for task, spans in split.spans.items():
            outside = split.num_lost_spans[task]
            num_spans.setdefault(task, {})[name] = len(spans.rows_S4) + outside
        for at, windowing in enumerate(windowings):
            windows = cut_windows(num_first_E, num_second_E, windowing, num_special)
            windows_E = np.bincount(windows.example_W, minlength=len(length_E))
            over[at][name] = int((length_E > windowing.max_length).sum())
            num_windows[at][name] = len(windows.example_W)
            reach = (windows.from_2W, windows.to_2W, windows_E)
            for task, spans in split.spans.items():
                num_lost = _num_lost(spans, num_before, second_at_E, *reach)
                lost[at].setdefault(task, {})[name] = num_lost + split.num_lost_spans[task]
    cuts = [
        CutFacts(windowing.max_length, over[at], num_windows[at], lost[at])
        for at, windowing in enumerate(windowings)
    ]
    num_texts = {name: len(rows) for name, rows in dataset.splits.items()}
    return LengthFacts(num_texts, num_tokens, quantiles, num_spans, cuts)


def _num_first(split: TokenizedSplit, num_before: int) -> IntArray:
    """Tokens of the first segment of each text: those between the special tokens around it."""
    special_EN = np.flatnonzero(split.char_start_T == -1).reshape(split.num_windows, -1)
    return special_EN[:, num_before] - split.window_start_W1[:-1] - num_before


def _num_lost(
    spans: WindowSpans,
    first_at: int,
    second_at_E: IntArray,
    from_2W: IntArray,
    to_2W: IntArray,
    windows_E: IntArray,
) -> int:
    """How many of the spans of whole texts no window holds whole."""
    example_S = np.repeat(np.arange(len(windows_E)), np.diff(spans.start_W1))
    begin_S, end_S = spans.rows_S4[:, 1], spans.rows_S4[:, 2]
    segment_S = (begin_S >= second_at_E[example_S]).astype(np.int64)
    at_S = np.where(segment_S == 1, second_at_E[example_S], first_at)
    count_S = windows_E[example_S]
    span = np.repeat(np.arange(len(example_S)), count_S)
    window = ragged_arange(starts(windows_E)[example_S], count_S)
    low, high = from_2W[segment_S[span], window], to_2W[segment_S[span], window]
    is_whole = (low <= (begin_S - at_S)[span]) & ((end_S - at_S)[span] < high)
    return len(example_S) - len(np.unique(span[is_whole]))
