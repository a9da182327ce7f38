"""Facts about a data set before training; `hpo.data.advice` judges them.

Texts are equal if they differ in case and white space alone. The comparison is of 64-bit hashes: a million
rows take 8 MB.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hpo.data.dataset import DataSet
from hpo.data.span_ends import OddSpans
from hpo.data.token_cache import load_tokenized
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Kind, kind_of
from hpo.tasks.tokenized_split import WHOLE_TEXTS, Windowing

_logger = logging.getLogger("hpo.data")


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class SplitFacts:
    """The rows of one split."""

    num_rows: int
    num_duplicates: int
    """Number of rows with the text of an earlier row."""


@dataclass(frozen=True)
class Leak:
    """Texts in two splits."""

    split: str
    """The split for evaluation: validation or test."""
    other: str
    num_rows: int
    """Number of rows of `split` with a text of `other`."""
    ids: tuple[str, str]
    """Ids of the first such row and of its twin in `other`."""


@dataclass
class TaskFacts:
    """Facts about one task; every mapping is by split."""

    name: str
    kind: str
    labels: tuple[str, ...]
    is_inferred: bool = False
    """True if the classes come from the training rows, not from a declaration."""
    num_rows: dict[str, int] = field(default_factory=dict)
    """Number of rows of the sources with this task: all rows of a single source."""
    num_annotated: dict[str, int] = field(default_factory=dict)
    """Number of annotated rows."""
    num_empty: dict[str, int] = field(default_factory=dict)
    """Number of annotated rows without any class or span (multi_label and the kinds of spans)."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of rows of each class, or of spans of each span name; 0 included."""
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Minimum, mean, std and maximum of a regression's targets."""
    odd_spans: OddSpans | None = None
    """Spans with an end inside a word or at a space, if there are many."""

    @property
    def counts_spans(self) -> bool:
        return KINDS[self.kind].in_spans


@dataclass(frozen=True)
class DataFacts:
    """Facts about splits, tasks, leaks and sources."""

    splits: Mapping[str, SplitFacts]
    tasks: Sequence[TaskFacts]
    leaks: Sequence[Leak]
    sources: Mapping[str, Mapping[str, int]]
    """By split, the number of rows of each source; empty for a single source."""


def data_facts(dataset: DataSet) -> DataFacts:
    tasks = [
        TaskFacts(task.name, task.kind, task.labels, task.is_inferred, odd_spans=dataset.odd_spans(task.name))
        for task in dataset.tasks
    ]
    splits: dict[str, SplitFacts] = {}
    keys: dict[str, NDArray[np.int64]] = {}
    for split, examples in dataset.splits.items():
        _logger.info("checking the %s split", split)
        key_E = np.fromiter((hash(normalised(row.text)) for row in examples), dtype=np.int64)
        keys[split] = key_E
        splits[split] = SplitFacts(len(examples), len(examples) - len(np.unique(key_E)))
        for task, facts in zip(dataset.tasks, tasks, strict=True):
            _count(facts, kind_of(task), split, examples)
            facts.num_rows[split] = _num_rows(task.name, examples, dataset.sources.get(split, {}))
    leaks = []
    for other, split in combinations(splits, 2):
        is_in_other_E = np.isin(keys[split], keys[other])
        if is_in_other_E.any():
            first = int(is_in_other_E.argmax())
            twin = int((keys[other] == keys[split][first]).argmax())
            ids = (dataset.splits[split][first].id, dataset.splits[other][twin].id)
            leaks.append(Leak(split, other, int(is_in_other_E.sum()), ids))
    return DataFacts(splits, tasks, leaks, dataset.sources)


def _num_rows(task: str, examples: Sequence[Example], sources: Mapping[str, int]) -> int:
    """Return the number of rows of the sources with a task: a source with the task has an annotated row."""
    parts = np.split(np.arange(len(examples)), np.cumsum(list(sources.values()))[:-1]) if sources else []
    sizes = [len(part) for part in parts if any(task in examples[row].annotated for row in part)]
    return sum(sizes) or len(examples)


def _count(facts: TaskFacts, kind: Kind, split: str, examples: Iterable[Example]) -> None:
    """Add the counts of a split to the facts of one task."""
    rows = [example for example in examples if facts.name in example.annotated]
    facts.num_annotated[split] = len(rows)
    if kind.is_number:
        if rows:
            values = np.array([row.labels[facts.name] for row in rows])
            moments = map(float, (values.min(), values.mean(), values.std(), values.max()))
            facts.numbers[split] = dict(zip(("minimum", "mean", "std", "maximum"), moments, strict=True))
        return
    names = [kind.label_names(row) for row in rows]
    counts = Counter(chain.from_iterable(names))
    facts.counts[split] = {label: counts[label] for label in facts.labels}
    if kind.is_list or kind.in_spans:
        facts.num_empty[split] = sum(not classes for classes in names)


@dataclass(frozen=True)
class CutFacts:
    """Losses of texts at one `max_length`; mappings are by split."""

    max_length: int
    num_over: Mapping[str, int]
    """Number of texts longer than one window."""
    num_windows: Mapping[str, int]
    num_lost_spans: Mapping[str, Mapping[str, int]]
    """By task, the number of spans not whole in any window."""


@dataclass(frozen=True)
class LengthFacts:
    """The lengths of texts in tokens, special tokens included; mappings are by split."""

    num_tokens: Mapping[str, int]
    quantiles: Mapping[str, Sequence[int]]
    """The percentiles 0 to 100 of the lengths."""
    num_spans: Mapping[str, Mapping[str, int]]
    """By task."""
    cuts: Sequence[CutFacts]
    """By `max_length`, the smallest first."""


def length_facts(
    dataset: DataSet, tokenizer: PreTrainedTokenizerBase, windowings: Sequence[Windowing], cache_dir: Path
) -> LengthFacts:
    """Tokenise the data set and cut it by each of `windowings`; errors are those of `load_tokenized`."""
    uncut = Windowing(WHOLE_TEXTS, pair_segments=windowings[0].pair_segments)
    whole = {name: load_tokenized(dataset, name, tokenizer, uncut, cache_dir) for name in dataset.splits}
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
        quantiles={
            name: np.percentile(split.lengths_W, range(101), method="inverted_cdf").astype(int).tolist()
            for name, split in whole.items()
        },
        num_spans=num_spans,
        cuts=cuts,
    )
