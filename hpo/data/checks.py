"""What can be known of a data set before anything is trained: facts alone, without an opinion.

Texts are compared by their 64-bit hashes in this process, as they are and after `normalised`, so that a
million rows take 16 MB for it. What to change is in `hpo.data.advice`, lengths in tokens are in
`hpo.data.lengths`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hpo.data.dataset import DataSet
from hpo.data.examples import SPAN_KINDS, Example
from hpo.data.progress import logged
from hpo.data.tasks import Task

NUM_SHOWN = 3
"""Rows that are named as examples."""


def normalised(text: str) -> str:
    """`text` in one case, with single spaces: texts that agree in it are near-exact duplicates."""
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class SplitFacts:
    """The rows of one split."""

    num_rows: int
    num_duplicates: int
    """Rows whose text an earlier row of the split has."""
    num_near_duplicates: int
    """Further rows whose text an earlier row has but for case and white space."""


@dataclass(frozen=True)
class Leak:
    """Texts that stand in two splits."""

    split: str
    """The split that is evaluated: validation or test."""
    other: str
    num_rows: int
    """Rows of `split` whose text, but for case and white space, `other` has too."""
    num_exact: int
    """Of these, the rows whose text is the same character by character."""
    ids: tuple[tuple[str, str], ...]
    """The first of them: the row's id and that of a row of `other`."""


@dataclass(frozen=True)
class NumberFacts:
    """The targets of a regression task in one split."""

    minimum: float
    mean: float
    std: float
    maximum: float


@dataclass
class TaskFacts:
    """What the splits hold of one task; every mapping is by split."""

    name: str
    kind: str
    labels: tuple[str, ...]
    num_annotated: dict[str, int] = field(default_factory=dict)
    """Rows that hold the task's truth."""
    num_empty: dict[str, int] = field(default_factory=dict)
    """Of these, rows without any class or span (multi_label and the kinds of spans)."""
    num_several: dict[str, int] = field(default_factory=dict)
    """Of these, rows with more than one class or span."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """By class: the rows that have it; by span name: the spans. Every class and span name is there."""
    numbers: dict[str, NumberFacts] = field(default_factory=dict)
    """Of regression."""
    num_contradicting: dict[str, int] = field(default_factory=dict)
    """Rows of a split whose text another of its rows has with another label."""

    @property
    def counts_spans(self) -> bool:
        """Whether `counts` are of spans."""
        return self.kind in SPAN_KINDS


@dataclass(frozen=True)
class DataFacts:
    """All that `data_facts` finds."""

    splits: Mapping[str, SplitFacts]
    tasks: Sequence[TaskFacts]
    leaks: Sequence[Leak]


def data_facts(dataset: DataSet, *, say: bool = False) -> DataFacts:
    """Look at every row of the data set once; `say` logs how far it is."""
    tasks = [TaskFacts(task.name, task.kind, task.labels) for task in dataset.tasks]
    splits: dict[str, SplitFacts] = {}
    keys: dict[str, NDArray[np.int64]] = {}
    for split, examples in dataset.splits.items():
        key_2E = np.empty((2, len(examples)), dtype=np.int64)
        tallies = [_Tally(task) for task in dataset.tasks]
        rows = logged(examples, f"looking at the {split} split", len(examples)) if say else examples
        for e, example in enumerate(rows):
            text = example.text
            key_2E[:, e] = hash(text), hash(normalised(text))
            for tally in tallies:
                tally.add(example)
        for facts, tally in zip(tasks, tallies, strict=True):
            tally.into(facts, split)
        num_distinct, num_apart = (len(np.unique(key_E)) for key_E in key_2E)
        splits[split] = SplitFacts(len(examples), len(examples) - num_distinct, num_distinct - num_apart)
        for facts, count in zip(tasks, _contradicting(examples, key_2E[1], dataset.tasks), strict=True):
            facts.num_contradicting[split] = count
        keys[split] = key_2E
    leaks = [
        leak
        for other, split in combinations(splits, 2)
        if (leak := _leak(dataset, split, other, keys[split], keys[other])).num_rows
    ]
    return DataFacts(splits, tasks, leaks)


class _Tally:
    """Counts one task over the rows of one split."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._counts = Counter[str]()
        self._num = self._num_empty = self._num_several = 0
        self._numbers: list[float] = []

    def add(self, example: Example) -> None:
        task = self._task
        if task.name not in example.annotated:
            return
        self._num += 1
        if task.kind in SPAN_KINDS:
            num = 0
            for name in example.spans and task.labels:
                if spans := example.spans.get(name):
                    self._counts[name] += len(spans)
                    num += len(spans)
        else:
            label = example.labels[task.name]
            if isinstance(label, list):
                num = len(label)
                self._counts.update(label)
            else:
                num = 1
                if isinstance(label, str):
                    self._counts[label] += 1
                else:
                    self._numbers.append(label)
        self._num_empty += num == 0
        self._num_several += num > 1

    def into(self, facts: TaskFacts, split: str) -> None:
        facts.num_annotated[split] = self._num
        if self._task.kind == "regression":
            if self._numbers:
                values = np.array(self._numbers)
                found = (values.min(), values.mean(), values.std(), values.max())
                facts.numbers[split] = NumberFacts(*map(float, found))
            return
        facts.counts[split] = {label: self._counts[label] for label in self._task.labels}
        if self._task.kind != "single_label":
            facts.num_empty[split] = self._num_empty
            facts.num_several[split] = self._num_several


def _contradicting(
    examples: Sequence[Example], key_E: NDArray[np.int64], tasks: Sequence[Task]
) -> Iterator[int]:
    """Of each task, the rows whose text another row has with another label."""
    order = np.argsort(key_E, kind="stable")
    is_same = np.append(False, np.diff(key_E[order]) == 0)
    groups: list[list[Example]] = []
    for at in np.flatnonzero(is_same):
        if not is_same[at - 1]:
            groups.append([examples[int(order[at - 1])]])
        groups[-1].append(examples[int(order[at])])
    for task in tasks:
        num = 0
        for group in groups if task.kind not in SPAN_KINDS else ():
            labels = [example.labels[task.name] for example in group if task.name in example.labels]
            distinct = {tuple(sorted(label)) if isinstance(label, list) else label for label in labels}
            num += len(labels) if len(distinct) > 1 else 0
        yield num


def _leak(
    dataset: DataSet, split: str, other: str, key_2E: NDArray[np.int64], other_2E: NDArray[np.int64]
) -> Leak:
    is_near_E = np.isin(key_2E[1], other_2E[1])
    is_exact_E = np.isin(key_2E[0], other_2E[0])
    ids = tuple(
        (
            dataset.splits[split][int(e)].id,
            dataset.splits[other][int(np.flatnonzero(other_2E[1] == key_2E[1, e])[0])].id,
        )
        for e in np.flatnonzero(is_near_E)[:NUM_SHOWN]
    )
    return Leak(split, other, int(is_near_E.sum()), int(is_exact_E.sum()), ids)
