"""What the facts of a data set say that its study should change: a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from hpo.config.study_config import StudyConfig
from hpo.data.checks import DataFacts, LengthFacts, TaskFacts
from hpo.tasks.registry import KINDS


def data_advice(data: DataFacts, lengths: LengthFacts, config: StudyConfig) -> list[str]:
    """What to change, since scores mislead or truth is lost otherwise; names between backticks."""
    num_texts = sum(split.num_rows for split in data.splits.values())
    advice = [*_leaks(data), *_cuts(lengths, num_texts, config)]
    for task in data.tasks:
        advice += [*_unlabelled(task, data, is_csv=config.data.source == "csv"), *_classes(task)]
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


def _unlabelled(task: TaskFacts, data: DataFacts, *, is_csv: bool) -> Iterator[str]:
    why = " (an empty cell means that)" if is_csv else ""
    for split, num in task.num_annotated.items():
        rows = data.splits[split].num_rows
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
    for label in task.labels if task.counts else ():
        if not task.counts["train"][label] and any(of[label] for of in task.counts.values()):
            yield (
                f"`{task.name}`: `{label}` is evaluated, but in no training row: move rows to training, or "
                "leave it out of the task."
            )


def _part(num: int, total: int, what: str, of: str) -> str:
    """`12 of 300 texts (4.0 %) of train are`."""
    are = "is" if num == 1 else "are"
    return f"{num:,} of {total:,} {what}s ({100 * num / max(total, 1):.1f} %) of {of} {are}"
