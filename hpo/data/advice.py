"""Advice about a data set: a sentence for each fact that misleads scores or loses truth."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence

from hpo.config.study_config import StudyConfig
from hpo.data.checks import DataFacts, LengthFacts, TaskFacts, normalised
from hpo.tasks.kind import KINDS

_EMPTY = {"none", "nan", "null", "na", "n/a", "<na>", "nat", "#n/a"}
"""Words of programs for a missing value; `none` in small letters is a usual class."""


def data_advice(data: DataFacts, lengths: LengthFacts, config: StudyConfig) -> list[str]:
    """Return the advice; names are between backticks."""
    num_texts = sum(split.num_rows for split in data.splits.values())
    num_windows = max(cut.num_windows["train"] for cut in lengths.cuts)
    advice = [*_leaks(data), *_cuts(lengths, num_texts, config), *_batch(num_windows, config)]
    is_csv = "csv" in (config.data.source, *(one.source for one in config.data.sources))
    for task in data.tasks:
        advice += [*_unlabelled(task, is_csv=is_csv), *_few_rows(task), *_missing_classes(task)]
        advice += [*_similar_classes(task), *_inferred_classes(task), *_equal_numbers(task)]
        advice += [f"`{task.name}`: {task.odd_spans}"] if task.odd_spans else []
    return advice


def study_lengths(config: StudyConfig) -> list[int]:
    """Return every `max_length` of the study's trials, ascending."""
    searched = config.search_space.get("max_length")
    return sorted(map(int, searched.grid())) if searched else [config.training.max_length]


def _leaks(data: DataFacts) -> Iterator[str]:
    for leak in data.leaks:
        rows = data.splits[leak.split].num_rows
        if leak.num_rows >= 0.005 * rows:
            yield (
                f"{_part(leak.num_rows, rows, 'text', leak.split)} in {leak.other} too "
                f"(row `{leak.ids[0]}` is `{leak.ids[1]}`): its scores are too good. "
                f"Remove them from {leak.other}, or give rows that belong together the same `group`."
            )


def _cuts(lengths: LengthFacts, num_texts: int, config: StudyConfig) -> Iterator[str]:
    cuts_off = config.data.long_text == "truncate"
    longest = max(values[-1] for values in lengths.quantiles.values())
    remedy = f"set `data.long_text: window`, or raise `max_length` (the longest text has {longest:,} tokens)"
    for cut in lengths.cuts:
        lost = {task: sum(of.values()) for task, of in cut.num_lost_spans.items()}
        for task, num in lost.items():
            if num and num >= 0.01 * (total := sum(lengths.num_spans[task].values())):
                yield (
                    f"{_part(num, total, 'span', f'`{task}`')} lost at `max_length` {cut.max_length}: "
                    f"{remedy if cuts_off else 'raise `data.stride`'}."
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
