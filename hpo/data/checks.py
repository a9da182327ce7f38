"""Facts about a data set before training, and a sentence of advice for each that misleads scores.

Texts of two splits are compared by 64-bit hashes (`hpo.data.groups`): a million rows take 8 MB. Near
duplicates and groups are counted in the splits for evaluation alone.
"""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hpo.config.study_config import StudyConfig
from hpo.data.dataset import DataSet
from hpo.data.groups import evidence_groups, normalised, text_keys
from hpo.data.token_cache import load_tokenized
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Kind, kind_of
from hpo.tasks.tokenized_split import WHOLE_TEXTS, TokenizedSplit, Windowing

_logger = logging.getLogger("hpo.data")


@dataclass(frozen=True)
class SplitFacts:
    """The rows of one split."""

    num_rows: int
    num_duplicates: int
    """Number of rows with the text of an earlier row."""
    num_alike: int | None = None
    """Number of rows that are duplicates or near duplicates of others. None: a split for training."""
    num_groups: int | None = None
    """Number of independent pieces of evidence: groups of rows. None: a split for training."""


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
    metrics: tuple[str, ...] = ()
    """The primary one first."""
    span_warnings: Sequence[str] = ()
    """Sentences about spans with probably wrong ends, and about faults of tags."""
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

    def evidence(self) -> Iterator[str]:
        """Yield a sentence about each split for evaluation."""
        for name, of in self.splits.items():
            if of.num_groups is not None:
                pieces = f"{of.num_groups:,} independent piece{'s' * (of.num_groups != 1)} of evidence"
                alike = f"{of.num_alike:,} rows are duplicates or near duplicates of others"
                yield f"The {of.num_rows:,} rows of {name} are {pieces}: {alike}."


def data_facts(dataset: DataSet) -> DataFacts:
    tasks = [
        TaskFacts(
            *(task.name, task.kind, task.labels, task.is_inferred, task.metrics),
            span_warnings=dataset.span_warnings(task.name),
        )
        for task in dataset.tasks
    ]
    splits: dict[str, SplitFacts] = {}
    keys: dict[str, NDArray[np.int64]] = {}
    for split, examples in dataset.splits.items():
        _logger.info("checking the %s split", split)
        keys[split] = key_E = text_keys(row.text for row in examples)
        evidence = () if split == "train" else _evidence(examples, dataset.evidence_groups(split))
        splits[split] = SplitFacts(len(examples), len(examples) - len(np.unique(key_E)), *evidence)
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


def _evidence(examples: Sequence[Example], groups: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows with equal or near-duplicate texts, and of groups."""
    alike = Counter(evidence_groups([example.text for example in examples], [None] * len(examples)))
    return sum(num for num in alike.values() if num > 1), len({*groups})


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
    num_unknown_tokens: int = 0
    num_texts_of_equal_tokens: int = 0


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
        num_unknown_tokens=sum(int((s.input_ids_T == tokenizer.unk_token_id).sum()) for s in whole.values()),
        num_texts_of_equal_tokens=_num_equal(whole.values()),
    )


def _num_equal(splits: Collection[TokenizedSplit]) -> int:
    """Return the number of texts with the tokens of a text with another key; a text is one window."""
    keys = np.concatenate([text_keys(row.text for row in split.examples) for split in splits])
    tokens = [hash(t.tobytes()) for s in splits for t in np.split(s.input_ids_T, s.window_start_W1[1:-1])]
    values, counts = np.unique(np.unique([tokens, keys], axis=1)[0], return_counts=True)
    return int(np.isin(tokens, values[counts > 1]).sum())


_EMPTY = {"none", "nan", "null", "na", "n/a", "<na>", "nat", "#n/a"}
"""Words of programs for a missing value; `none` in small letters is a usual class."""


def data_advice(data: DataFacts, lengths: LengthFacts, config: StudyConfig) -> list[str]:
    """Return the advice; names are between backticks."""
    num_texts = sum(split.num_rows for split in data.splits.values())
    num_windows = max(cut.num_windows["train"] for cut in lengths.cuts)
    advice = [*_leaks(data, config), *_cuts(lengths, num_texts, config), *_batch(num_windows, config)]
    is_csv = "csv" in (config.data.source, *(one.source for one in config.data.sources))
    for task in data.tasks:
        advice += [*_unlabelled(task, is_csv=is_csv), *_few_rows(task), *_missing_classes(task)]
        advice += [*_similar_classes(task), *_inferred_classes(task), *_equal_numbers(task)]
        advice += [f"`{task.name}`: {warning}" for warning in task.span_warnings]
    return advice


def study_lengths(config: StudyConfig) -> list[int]:
    """Return every `max_length` of the study's trials, ascending."""
    searched = config.search_space.get("max_length")
    return sorted(map(int, searched.grid())) if searched else [config.training.max_length]


def _leaks(data: DataFacts, config: StudyConfig) -> Iterator[str]:
    tables = [one for one in (config.data, *config.data.sources) if not one.is_default("columns")]
    where = " (`columns.group` in `data` names its column)" if tables else ""
    for leak in data.leaks:
        rows = data.splits[leak.split].num_rows
        if leak.num_rows >= 0.005 * rows:
            yield (
                f"{_part(leak.num_rows, rows, 'text', leak.split)} in {leak.other} too "
                f"(row `{leak.ids[0]}` is `{leak.ids[1]}`): its scores are too good. "
                f"Remove them from {leak.other}, or give rows that belong together the same `group`{where}."
            )


def _cuts(lengths: LengthFacts, num_texts: int, config: StudyConfig) -> Iterator[str]:
    cuts_off = config.data.long_text == "truncate"
    longest = max(values[-1] for values in lengths.quantiles.values())
    num_tokens, other = sum(lengths.num_tokens.values()), "Take an encoder with a vocabulary for them."
    if (num := lengths.num_unknown_tokens) >= 0.05 * num_tokens:
        yield f"{_part(num, num_tokens, 'token', 'the data')} unknown to the tokenizer. {other}"
    if (num := lengths.num_texts_of_equal_tokens) and num >= 0.01 * num_texts:
        yield f"{_part(num, num_texts, 'text', 'the data')} equal in tokens to a different text. {other}"
    remedy = f"set `data.long_text: window`, or raise `max_length` (the longest text has {longest:,} tokens)"
    for cut in lengths.cuts:
        lost = {task: sum(of.values()) for task, of in cut.num_lost_spans.items()}
        for task, num in lost.items():
            if num and num >= 0.01 * (total := sum(lengths.num_spans[task].values())):
                yield (
                    f"{_part(num, total, 'span', f'`{task}`')} lost at `max_length` {cut.max_length}: "
                    f"{remedy if cuts_off else 'raise `max_length`, or `data.stride` for shorter spans'}."
                )
        num_over = sum(cut.num_over.values())
        if cuts_off and num_over >= 0.05 * num_texts and not any(lost.values()):
            are_cut = f"{_part(num_over, num_texts, 'text', 'the data')} cut"
            yield f"{are_cut} at `max_length` {cut.max_length}: {remedy}."


def _batch(num_texts: int, config: StudyConfig) -> Iterator[str]:
    searched = config.search_space.get("batch_size")
    sizes = getattr(searched, "choices", (getattr(searched, "high", config.training.batch_size),))
    if (largest := max(sizes)) > num_texts:
        yield (
            f"`batch_size` {largest:,} is more than the {num_texts:,} texts of train: each step sees all of "
            f"them. Take at most {max(1, num_texts // 2):,}."
        )


def _unlabelled(task: TaskFacts, *, is_csv: bool) -> Iterator[str]:
    why = " (as an empty cell is)" if is_csv else ""
    for split, num in task.num_annotated.items():
        rows = task.num_rows[split]
        if num < 0.05 * rows:
            yield (
                f"{_part(rows - num, rows, 'row', split)} not labelled for `{task.name}`{why}: label more, "
                "write `[]` for no class, or leave the task out of `data.tasks`."
            )
    empty, num = task.num_empty.get("train", 0), task.num_annotated["train"]
    if is_csv and KINDS[task.kind].is_list and empty > 0.9 * num:
        yield (
            f"{_part(empty, num, 'row', 'train')} without a class of `{task.name}`: if nobody labelled them, "
            "set `data.csv.empty: unlabelled`."
        )


def _few_rows(task: TaskFacts) -> Iterator[str]:
    """Report splits without a score or with one labelled row; r2 needs two rows."""
    for split, num in task.num_annotated.items():
        rows = f"{num} labelled row{'s' * (num != 1)} of `{task.name}`"
        if num < (2 if KINDS[task.kind].is_number and split != "train" else 1):
            yield f"{split} has no `score`, since it has {rows}: label more."
        elif num == 1:
            yield f"{split} has {rows}: nothing can be learnt or measured. Label more."


def _missing_classes(task: TaskFacts) -> Iterator[str]:
    counts = task.counts
    absent = [label for label in task.labels if not any(of[label] for of in counts.values())]
    if absent and counts:
        yield (
            f"`{task.name}`: no row has {_names(absent)}: is the spelling that of the data? If it is, label "
            "rows of it, or leave it out of the task."
        )
    for split, of in counts.items():
        missing = [label for label in task.labels if not of[label] and label not in absent]
        if missing:
            it = "it" if len(missing) == 1 else "them"
            why = "no model can learn" if split == "train" else "its metrics say nothing of"
            yield (
                f"`{task.name}`: no row of {split} has {_names(missing)}: {why} {it}. Label rows of {it} "
                f"in {split}, or leave {it} out of the task."
            )


def _similar_classes(task: TaskFacts) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for label in task.labels:
        alike.setdefault(_spelling(label), []).append(label)
    for labels in alike.values():
        if len(labels) > 1:
            yield (
                f"`{task.name}`: {_names(labels)} are different classes, but differ only in case, spaces, "
                "accents or hyphens. Write them in one way."
            )


def _spelling(label: str) -> str:
    """Return a key; equal keys are probably one class."""
    plain = "".join(one for one in unicodedata.normalize("NFKC", label) if unicodedata.category(one) != "Cf")
    joined = re.sub(r"(?<=[^\W\d_])[\s_-]+(?=[^\W\d_])", "", normalised(plain))
    return re.sub(r"^(-?\d+)\.0+$", r"\1", joined)


def _inferred_classes(task: TaskFacts) -> Iterator[str]:
    """Report inferred classes with the name of a missing value, or with several names in one."""
    if not task.is_inferred:
        return
    if empty := [label for label in task.labels if label != "none" and label.lower() in _EMPTY]:
        yield (
            f"`{task.name}`: {_names(empty)} is a class: if it means that nobody labelled the row, leave its "
            "cell empty. If it is a class, list it in the `classes` of the task."
        )
    if KINDS[task.kind].is_list:
        parts = {label: [part.strip() for part in re.split("[,;/]", label)] for label in task.labels}
        numbers = Counter(part for pieces in parts.values() for part in set(pieces))
        for label, pieces in parts.items():
            if len(pieces) > 1 and max(numbers[part] for part in pieces) > 1:
                yield (
                    f"`{task.name}`: `{label}` is one class. If it names several, give a list, or separate "
                    "them by `|` (in csv, or as `data.csv.list_separator` says). If it is a class, list it "
                    "in the `classes` of the task."
                )
                return


def _equal_numbers(task: TaskFacts) -> Iterator[str]:
    for split, of in task.numbers.items():
        if of["minimum"] == of["maximum"] and task.num_annotated[split] > 1:
            why = "there is nothing to learn" if split == "train" else "r2 is 0 or 1 there"
            all_of = f"all {task.num_annotated[split]:,} numbers of {split}"
            yield f"`{task.name}`: {all_of} are {of['minimum']:.15g}: {why}. Check the column."


def _names(labels: Sequence[str]) -> str:
    """Return text such as "`a`, `b` and 3 more"."""
    names = [f"`{label}`" for label in labels[:5]] + [f"{len(labels) - 5} more"] * (len(labels) > 5)
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _part(num: int, total: int, what: str, of: str) -> str:
    """Return text such as "12 of 300 texts (4.0 %) of train are"."""
    are = "is" if num == 1 else "are"
    return f"{num:,} of {total:,} {what}s ({100 * num / max(total, 1):.1f} %) of {of} {are}"
