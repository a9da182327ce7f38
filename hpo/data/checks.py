"""Facts about a data set before anything is trained; the advice is in `hpo.data.advice`.

Texts are the same if they differ in case and white space alone. Their 64-bit hashes are compared, so that a
million rows take 8 MB.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpo.data.dataset import DataSet
from hpo.data.span_ends import OddSpans
from hpo.data.token_cache import load_tokenized
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Kind, kind_of
from hpo.tasks.tokenized_split import WHOLE_TEXTS, IntArray, Windowing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger("hpo.data")


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class SplitFacts:
    """The rows of one split."""

    num_rows: int
    num_duplicates: int
    """Rows whose text an earlier row of the split has."""


@dataclass(frozen=True)
class Leak:
    """Texts that stand in two splits."""

    split: str
    """The split that is evaluated: validation or test."""
    other: str
    num_rows: int
    """Rows of `split` whose text `other` has too."""
    ids: tuple[str, str]
    """The id of the first of them, and that of a row of `other`."""


@dataclass
class TaskFacts:
    """What the splits hold of one task; every mapping is by split."""

    name: str
    kind: str
    labels: tuple[str, ...]
    is_inferred: bool = False
    """The classes are those of the training rows, since no place declares them."""
    num_rows: dict[str, int] = field(default_factory=dict)
    """Rows of the sources that have the task: all rows where the data set is one."""
    num_annotated: dict[str, int] = field(default_factory=dict)
    """Rows that hold the task's truth."""
    num_empty: dict[str, int] = field(default_factory=dict)
    """Of these, rows without any class or span (multi_label and the kinds of spans)."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """By class: the rows that have it; by span name: the spans. Every class and span name is there."""
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of regression: minimum, mean, std and maximum of the targets."""
    odd_spans: OddSpans | None = None
    """Spans that begin or end inside a word or at a space, if they are many."""

    @property
    def counts_spans(self) -> bool:
        return KINDS[self.kind].in_spans


@dataclass(frozen=True)
class DataFacts:
    """All that `data_facts` finds."""

    splits: Mapping[str, SplitFacts]
    tasks: Sequence[TaskFacts]
    leaks: Sequence[Leak]
    sources: Mapping[str, Mapping[str, int]]
    """By split, the rows of each source of the data; empty: the data set is one."""


def data_facts(dataset: DataSet) -> DataFacts:
    tasks = [
        TaskFacts(task.name, task.kind, task.labels, task.is_inferred, odd_spans=dataset.odd_spans(task.name))
        for task in dataset.tasks
    ]
    splits: dict[str, SplitFacts] = {}
    keys: dict[str, NDArray[np.int64]] = {}
    for split, examples in dataset.splits.items():
        _logger.info("looking at the %s split", split)
        key_E = np.fromiter((hash(normalised(row.text)) for row in examples), dtype=np.int64)
        keys[split] = key_E
        splits[split] = SplitFacts(len(examples), len(examples) - len(np.unique(key_E)))
        for task, facts in zip(dataset.tasks, tasks, strict=True):
            _count(facts, kind_of(task), split, examples)
            facts.num_rows[split] = _num_rows(task.name, examples, dataset.sources.get(split, {}))
    pairs = [(split, other) for other, split in combinations(splits, 2)]
    leaks = [_leak(dataset, *pair, keys) for pair in pairs if np.isin(keys[pair[0]], keys[pair[1]]).any()]
    return DataFacts(splits, tasks, leaks, dataset.sources)


def _num_rows(task: str, examples: Sequence[Example], sources: Mapping[str, int]) -> int:
    """The rows of the sources with a task; a source without it has no row that is annotated for it."""
    parts = np.split(np.arange(len(examples)), np.cumsum(list(sources.values()))[:-1]) if sources else []
    held = [len(part) for part in parts if any(task in examples[row].annotated for row in part)]
    return sum(held) or len(examples)


def _count(facts: TaskFacts, kind: Kind, split: str, examples: Iterable[Example]) -> None:
    """Note what the rows of a split hold of one task."""
    rows = [example for example in examples if facts.name in example.annotated]
    facts.num_annotated[split] = len(rows)
    if kind.is_number:
        if rows:
            values = np.array([row.labels[facts.name] for row in rows])
            moments = {"minimum": values.min(), "mean": values.mean(), "std": values.std()}
            moments["maximum"] = values.max()
            facts.numbers[split] = {name: float(value) for name, value in moments.items()}
        return
    held = [kind.held(row) for row in rows]
    counts = Counter(chain.from_iterable(held))
    facts.counts[split] = {label: counts[label] for label in facts.labels}
    if kind.is_list or kind.in_spans:
        facts.num_empty[split] = sum(not classes for classes in held)


def _leak(dataset: DataSet, split: str, other: str, keys: Mapping[str, NDArray[np.int64]]) -> Leak:
    is_in_other_E = np.isin(keys[split], keys[other])
    first = int(is_in_other_E.argmax())
    same = int((keys[other] == keys[split][first]).argmax())
    ids = (dataset.splits[split][first].id, dataset.splits[other][same].id)
    return Leak(split, other, int(is_in_other_E.sum()), ids)


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
