"""What the facts of a data set say that its study should change: a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpo.config.study_config import StudyConfig
from hpo.data.checks import DataFacts, LengthFacts, TaskFacts, normalised
from hpo.tasks.registry import KINDS


def data_advice(data: DataFacts, lengths: LengthFacts, config: StudyConfig) -> list[str]:
    """What to change, since scores mislead or truth is lost otherwise; names between backticks."""
    num_texts = sum(split.num_rows for split in data.splits.values())
    advice = [*_leaks(data), *_cuts(lengths, num_texts, config)]
    is_csv = "csv" in (config.data.source, *(one.source for one in config.data.sources))
    for task in data.tasks:
        advice += _unlabelled(task, is_csv=is_csv)
        advice += [*_without_score(task), *_classes(task), *_numbers(task)]
    return advice


def study_lengths(config: StudyConfig) -> list[int]:
    """Every `max_length` that a trial of the study may have, ascending."""
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


def _unlabelled(task: TaskFacts, *, is_csv: bool) -> Iterator[str]:
    why = " (an empty cell means that)" if is_csv else ""
    for split, num in task.num_annotated.items():
        rows = task.num_rows[split]
        if num < 0.05 * rows:
            yield (
                f"{_part(rows - num, rows, 'row', split)} not labelled for `{task.name}`{why}: label more, "
                "write `[]` where nothing holds, or leave the task out of `data.tasks`."
            )
    empty, num = task.num_empty.get("train", 0), task.num_annotated["train"]
    if is_csv and KINDS[task.kind].is_list and empty > 0.9 * num:
        yield (
            f"{_part(empty, num, 'row', 'train')} without a class of `{task.name}`: if nobody labelled them, "
            "set `data.csv.empty: unlabelled`."
        )


def _classes(task: TaskFacts) -> Iterator[str]:
    """Report classes without rows in a split, and classes that are probably one."""
    held = {split: [label for label in task.labels if of[label]] for split, of in task.counts.items()}
    known = {label for labels in held.values() for label in labels}
    if nowhere := [label for label in task.labels if label not in known and held]:
        yield (
            f"`{task.name}`: no row has {_names(nowhere)}: is it spelt so in the data? If it is, label "
            "rows of it, or leave it out of the task."
        )
    for label in task.labels:
        if label in known and label not in held["train"]:
            yield (
                f"`{task.name}`: `{label}` is evaluated, but in no training row: move rows to training, or "
                "leave it out of the task."
            )
    for split in held:
        if unseen := [label for label in held["train"] if label not in held[split]]:
            yield (
                f"`{task.name}`: no row of {split} has {_names(unseen)}: the metrics there say nothing of "
                f"it. Label rows of it in {split}."
            )
    alike: dict[str, list[str]] = {}
    for label in task.labels:
        alike.setdefault(normalised(label), []).append(label)
    for labels in alike.values():
        if len(labels) > 1:
            yield (
                f"`{task.name}`: {_names(labels)} differ in case or white space alone, but are different "
                "classes: write them in one way."
            )


def _numbers(task: TaskFacts) -> Iterator[str]:
    """Report splits whose targets of a regression are all equal."""
    for split, of in task.numbers.items():
        if of["minimum"] == of["maximum"] and task.num_annotated[split] > 1:
            why = "there is nothing to learn" if split == "train" else "r2 is 0 or 1 there"
            all_of = f"all {task.num_annotated[split]:,} numbers of {split}"
            yield f"`{task.name}`: {all_of} are {of['minimum']:.15g}: {why}. Check the column."


def _without_score(task: TaskFacts) -> Iterator[str]:
    """Report splits without a primary metric of the task: r2 needs two rows, any other metric one."""
    for split, num in task.num_annotated.items():
        if num < (2 if KINDS[task.kind].is_number else 1):
            yield (
                f"{split} has no `score`, since it has {num} labelled row{'s' * (num != 1)} of "
                f"`{task.name}`: label more."
            )


def _names(labels: Sequence[str]) -> str:
    """`a`, `b` and 3 more."""
    shown = [f"`{label}`" for label in labels[:5]]
    if len(labels) > 5:
        return f"{', '.join(shown)} and {len(labels) - 5} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _part(num: int, total: int, what: str, of: str) -> str:
    """`12 of 300 texts (4.0 %) of train are`."""
    are = "is" if num == 1 else "are"
    return f"{num:,} of {total:,} {what}s ({100 * num / max(total, 1):.1f} %) of {of} {are}"
