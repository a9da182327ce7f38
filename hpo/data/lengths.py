"""How long the texts are in tokens, and what a `max_length` cuts off.

Every split is tokenised whole and at each length as for training, from the cache where it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpo.data.dataset import DataSet
from hpo.data.token_cache import load_tokenized
from hpo.data.tokenized_split import WHOLE_TEXTS, IntArray, Windowing

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

    num_tokens: Mapping[str, int]
    quantiles: Mapping[str, Sequence[int]]
    """101 lengths: that of the shortest text, those that 1 %, 2 % ... of the texts do not exceed."""
    num_spans: Mapping[str, Mapping[str, int]]
    """By task."""
    cuts: Sequence[CutFacts]
    """By `max_length`, the smallest first."""


def length_facts(
    dataset: DataSet, tokenizer: PreTrainedTokenizerBase, windowings: Sequence[Windowing], cache_dir: Path
) -> LengthFacts:
    """Tokenise the data set, or take it from the cache, and cut it by each of `windowings`.

    Raises what `hpo.data.token_cache.load_tokenized` raises.
    """
    of_whole = Windowing(WHOLE_TEXTS, pair_segments=windowings[0].pair_segments)
    whole = {name: load_tokenized(dataset, name, tokenizer, of_whole, cache_dir) for name in dataset.splits}
    num_spans = {
        task: {name: len(s.spans[task].rows_S4) + s.num_lost_spans[task] for name, s in whole.items()}
        for task in next(iter(whole.values())).spans
    }
    longest = max(int(split.lengths_W.max()) for split in whole.values())
    cuts = []
    for windowing in windowings:
        cut = whole
        if longest > windowing.max_length:
            cut = {name: load_tokenized(dataset, name, tokenizer, windowing, cache_dir) for name in whole}
        cuts.append(
            CutFacts(
                windowing.max_length,
                {name: int((s.lengths_W > windowing.max_length).sum()) for name, s in whole.items()},
                {name: split.num_windows for name, split in cut.items()},
                {task: {name: s.num_lost_spans[task] for name, s in cut.items()} for task in num_spans},
            )
        )
    return LengthFacts(
        num_tokens={name: split.num_tokens for name, split in whole.items()},
        quantiles={name: _quantiles(split.lengths_W) for name, split in whole.items()},
        num_spans=num_spans,
        cuts=cuts,
    )


def _quantiles(length_W: IntArray) -> list[int]:
    return [int(at) for at in np.percentile(length_W, range(101), method="inverted_cdf")]
