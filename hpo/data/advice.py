"""What the facts of a data set say that its study should change: a sentence each, with the file's key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.data.checks import DataFacts, TaskFacts, data_facts

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.data.dataset import DataSet
    from hpo.data.lengths import LengthFacts
    from hpo.data.tokenized_split import TokenizedSplit

EVALUATED = ("validation", "test")
FEW_ROWS = 100
"""Fewer rows to evaluate on make a metric that moves by points when one row changes."""
FEW_OF_CLASS = 5
IMBALANCE = 10
MAX_BRIEF = 2
MAX_ROWS = 50_000
"""More rows would take more than a second to look at."""


@dataclass(frozen=True)
class Advice:
    """One thing to change."""

    key: str
    """The key of the study file that changes it."""
    text: str
    """What was found, and what to do; names between backticks."""
    is_grave: bool = False
    """Whether scores mislead, or truth is lost, if nothing changes: `hpo run` says these."""


def data_advice(data: DataFacts, lengths: LengthFacts | None, config: StudyConfig) -> list[Advice]:
    """What to change, the gravest first. Without `lengths` nothing is said of what is cut off."""
    found = [*_leaks(data, config), *_lengths(lengths, config)]
    for task in data.tasks:
        found += _annotation(task, data, config)
        found += _classes(task, config)
    found += _sizes(data, config)
    return sorted(found, key=lambda advice: not advice.is_grave)


def brief_advice(
    dataset: DataSet, tokens: Sequence[tuple[str, TokenizedSplit]], config: StudyConfig
) -> list[str]:
    """At most `MAX_BRIEF` lines of what is grave in data that are in memory already, for `hpo run`.

    Nothing is tokenised: `tokens` are the splits that are. Generated data, and more rows than `MAX_ROWS`,
    are not looked at.
    """
    if config.data.source == "synthetic" or sum(map(len, dataset.splits.values())) > MAX_ROWS:
        return []
    cut_off = [] if "max_length" in config.search_space else _cut_off(tokens)
    grave = [advice.text for advice in data_advice(data_facts(dataset), None, config) if advice.is_grave]
    return [*cut_off, *grave][:MAX_BRIEF]


def _cut_off(tokens: Sequence[tuple[str, TokenizedSplit]]) -> Iterator[str]:
    for name, split in tokens:
        num = len(split.examples)
        if name == "train" and split.num_cut_examples >= 0.05 * num:
            lost = sum(split.num_lost_spans.values())
            spans = f", and {lost:,} spans are lost" * (lost > 0)
            yield (
                f"{_part(split.num_cut_examples, num, 'text')} of {name} {_are(split.num_cut_examples)} cut "
                f"at `max_length` {split.max_length}{spans}: raise it, or set `data.long_text: window`."
            )


def study_lengths(config: StudyConfig) -> list[int]:
    """Every `max_length` that a trial of the study may have, ascending."""
    searched = config.search_space.get("max_length")
    return sorted(map(int, searched.grid())) if searched else [config.training.max_length]


def _leaks(data: DataFacts, config: StudyConfig) -> Iterator[Advice]:
    for leak in data.leaks:
        rows = data.splits[leak.split].num_rows
        yield Advice(
            _split_key(leak.split, config),
            f"{_part(leak.num_rows, rows, 'text')} of {leak.split} {_stand(leak.num_rows)} in {leak.other} "
            "too "
            f"(row `{leak.ids[0][0]}` is `{leak.ids[0][1]}`), so {leak.split} scores are too good: remove "
            "them "
            f"from {leak.other}, or give rows that belong together the same `group` where splits are drawn.",
            is_grave=leak.num_rows >= max(2, 0.005 * rows),
        )
    for name, split in data.splits.items():
        num = split.num_duplicates + split.num_near_duplicates
        if num >= max(2, 0.01 * split.num_rows):
            twice = "the loss" if name == "train" else "the scores"
            yield Advice(
                _split_key(name, config),
                f"{_part(num, split.num_rows, 'text')} of {name} repeat an earlier one and count again in "
                f"{twice}: remove them unless that is meant.",
            )
    for task in data.tasks:
        for name, num in task.num_contradicting.items():
            if num:
                yield Advice(
                    _split_key(name, config),
                    f"{num:,} rows of {name} have a text that another row has with another `{task.name}`: no "
                    "model can be right about both; decide on one.",
                    is_grave=num >= 0.02 * data.splits[name].num_rows,
                )


def _lengths(lengths: LengthFacts | None, config: StudyConfig) -> Iterator[Advice]:
    if lengths is None:
        return
    cuts_off = config.data.long_text == "truncate"
    longest = max(values[-1] for values in lengths.quantiles.values())
    remedy = f"set `data.long_text: window`, or raise `max_length` (the longest text has {longest:,} tokens)"
    key = "search_space.max_length" if "max_length" in config.search_space else "training.max_length"
    num_texts = sum(lengths.num_texts.values())
    for cut in lengths.cuts:
        if cut.max_length not in study_lengths(config):
            continue
        lost = {task: sum(of.values()) for task, of in cut.num_lost_spans.items()}
        for task, num in lost.items():
            total = sum(lengths.num_spans[task].values())
            if num >= max(1, 0.001 * total):
                yield Advice(
                    "data.long_text" if cuts_off else "data.stride",
                    f"{_part(num, total, 'span')} of `{task}` {_are(num)} lost at `max_length` "
                    f"{cut.max_length}: "
                    + (
                        f"{remedy}." if cuts_off else "raise `data.stride` to the tokens of the longest span."
                    ),
                    is_grave=num >= 0.01 * total,
                )
        num_over = sum(cut.num_over.values())
        if cuts_off and num_over and not any(lost.values()):
            yield Advice(
                key,
                f"{_part(num_over, num_texts, 'text')} {_are(num_over)} cut at `max_length` "
                f"{cut.max_length}: "
                f"{remedy}.",
                is_grave=num_over >= 0.05 * num_texts,
            )


def _annotation(task: TaskFacts, data: DataFacts, config: StudyConfig) -> Iterator[Advice]:
    source, has_columns = config.data.source, config.data.source in config.data.SOURCES_OF["columns"]
    columns = "spans" if task.counts_spans else "labels"
    key = f"data.columns.{columns}" if has_columns else "data.tasks"
    for split, num in task.num_annotated.items():
        rows = data.splits[split].num_rows
        if num == 0:
            yield Advice(
                key,
                f"No row of {split} is labelled for `{task.name}`, which has no score there: label some, or "
                "leave the task out.",
                is_grave=True,
            )
        elif num < 0.5 * rows:
            why = " (an empty cell means that)" if source == "csv" else ""
            remedy = (
                "" if task.kind in ("single_label", "regression") else "; where nothing holds, write `[]`"
            )
            yield Advice(
                key,
                f"{_part(rows - num, rows, 'row')} of {split} are not labelled for `{task.name}`{why} and "
                "have "
                f"no part in its loss and scores{remedy}.",
                is_grave=num < 0.05 * rows,
            )
    found = task.numbers.get("train")
    if found is not None and found.std == 0:
        yield Advice(
            "data.tasks",
            f"Every training target of `{task.name}` is {found.mean:g}, so nothing can be learnt: leave the "
            "task out.",
            is_grave=True,
        )


def _classes(task: TaskFacts, config: StudyConfig) -> Iterator[Advice]:
    if not task.counts:
        return
    what = "span name" if task.counts_spans else "class"
    key = f"data.tasks.{task.name}.{'span_names' if task.counts_spans else 'classes'}"
    where = {
        label: tuple(split for split in task.counts if task.counts[split][label]) for label in task.labels
    }
    if unseen := [label for label in task.labels if where[label] and "train" not in where[label]]:
        yield Advice(
            key,
            f"`{task.name}`: {_named(what, unseen)} {_are(len(unseen))} evaluated, but in no training row, "
            "so "
            "no model can learn that: move rows to training, or leave it out.",
            is_grave=True,
        )
    if nowhere := [label for label in task.labels if not where[label]]:
        yield Advice(
            key,
            f"`{task.name}`: {_named(what, nowhere)} {_are(len(nowhere))} in no row, so a prediction of "
            "that is "
            "always wrong: leave it out.",
        )
    others = [split for split in task.counts if split != "train"]
    if never := [label for label in task.labels if where[label] == ("train",)] if others else []:
        yield Advice(
            _split_key("validation", config),
            f"`{task.name}`: {_named(what, never)} {_are(len(never))} in training rows alone, so no score "
            "says "
            f"how well that is found: move some rows to {' and '.join(others)}.",
        )
    of_validation = task.counts.get("validation", {})
    if few := [label for label in where if 0 < of_validation.get(label, 0) < FEW_OF_CLASS]:
        yield Advice(
            _split_key("validation", config),
            f"`{task.name}`: {_named(what, few)} {'has' if len(few) == 1 else 'have'} fewer than "
            f"{FEW_OF_CLASS} in validation, where one row decides much of such an F1, and of the macro mean: "
            "validate on more rows.",
        )
    yield from _balance(task, config)


def _balance(task: TaskFacts, config: StudyConfig) -> Iterator[Advice]:
    counts = {label: num for label, num in task.counts["train"].items() if num}
    if task.counts_spans or len(counts) < 2:
        return
    most, least = (pick(counts, key=lambda name: counts[name]) for pick in (max, min))
    weighs = config.training.class_weighting == "balanced" or "class_weighting" in config.search_space
    if counts[most] >= IMBALANCE * counts[least] and not weighs:
        yield Advice(
            "training.class_weighting",
            f"`{task.name}` has {counts[most]:,} training rows of `{most}` and {counts[least]:,} of "
            f"`{least}`: "
            "try `balanced`, which weighs rare classes up.",
        )
    if task.kind != "multi_label":
        return
    num, num_empty = task.num_annotated["train"], task.num_empty["train"]
    if not any(task.num_several.values()) and not any(task.num_empty.values()):
        yield Advice(
            f"data.tasks.{task.name}.kind",
            f"Every row has exactly one class of `{task.name}`: make it a `single_label` task, or name the "
            "character between classes in `data.csv.list_separator` if there are lists.",
        )
    elif num_empty > 0.9 * num:
        is_csv = config.data.source == "csv"
        yield Advice(
            "data.csv.empty" if is_csv else "data.tasks",
            f"{_part(num_empty, num, 'row')} of train have no class of `{task.name}`: if nobody labelled "
            "them, "
            + ("set `data.csv.empty: unlabelled`." if is_csv else "leave the label out of such rows."),
            is_grave=is_csv,
        )


def _sizes(data: DataFacts, config: StudyConfig) -> Iterator[Advice]:
    for split in EVALUATED:
        if split in data.splits and (num := data.splits[split].num_rows) < FEW_ROWS:
            yield Advice(
                _split_key(split, config),
                f"{split} has {num} row{'s' * (num > 1)}: differences of a few points between trials are "
                "chance; "
                "give it a few hundred.",
            )
    if "test" not in data.splits:
        yield Advice(
            _split_key("test", config),
            "There is no test split, and the best of many trials looks better on validation than it is: keep "
            "rows for a test.",
        )


def _split_key(split: str, config: StudyConfig) -> str:
    """The key that says which rows a split has: of its file, or of the share that is drawn for it."""
    data = config.data
    if data.source == "synthetic":
        return f"data.synthetic.num_{split}"
    if data.hub is not None:
        return f"data.hub.splits.{split}"
    if getattr(data.files, split):
        return f"data.files.{split}"
    is_drawn = split != "train" and not (data.path and (data.path / f"{split}.{data.source}").exists())
    return f"data.{split}_fraction" if is_drawn else "data.path"


def _part(num: int, total: int, what: str) -> str:
    """`12 of 300 texts (4.0 %)`."""
    return f"{num:,} of {total:,} {what}s ({100 * num / max(total, 1):.1f} %)"


def _stand(num: int) -> str:
    return "stands" if num == 1 else "stand"


def _are(num: int) -> str:
    return "is" if num == 1 else "are"


def _named(what: str, labels: Sequence[str], shown: int = 4) -> str:
    """`class `a``, or `6 classes (`a`, `b`, `c`, `d` and 2 more)`."""
    names = ", ".join(f"`{label}`" for label in labels[:shown])
    if len(labels) == 1:
        return f"{what} {names}"
    rest = f" and {len(labels) - shown} more" if len(labels) > shown else ""
    return f"{len(labels)} {'classes' if what == 'class' else f'{what}s'} ({names}{rest})"
