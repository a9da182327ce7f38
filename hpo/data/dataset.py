"""Read and check a data set: jsonl, csv and parquet files, the hub, own code, or the generator.

Each row goes through one check (`RowChecker`), and all problems of all files are reported together. A missing
split is drawn from the training rows by a hash of the row's group or id, so a group stays together. If no
group is drawn, the split is the one with about the wanted number of rows. `limits` keep the rows with the
smallest hashes: a larger limit keeps all rows of a smaller one.

Several sources are read one by one and then joined. A row has labels for the tasks of its source alone.
"""

import hashlib
import json
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpo.config.data_config import DataConfig, NamedSource, SourceConfig, SyntheticConfig, TaskConfig
from hpo.config.study_file import show
from hpo.data.examples import RowChecker, problem_list
from hpo.data.groups import groups_of
from hpo.data.hub import hub_readers
from hpo.data.sources import SPLITS, Reader, file_readers, located, nearest_file, own_readers
from hpo.data.span_ends import OddSpans, SpanEnds
from hpo.data.synthetic import GENERATOR_VERSION, TASKS_JSON, SyntheticRows
from hpo.data.tasks import make_tasks, parse_tasks, read_task_configs
from hpo.errors import DataError, InputError, did_you_mean
from hpo.extensions import NO_DATA, SOURCES
from hpo.tasks.example import Example
from hpo.tasks.kind import (
    KINDS,
    MULTI_HOT,
    Task,
    class_name,
    give_one_reading,
    is_multi_hot,
    kind_of,
    not_classes,
)

_logger = logging.getLogger("hpo.data")

NEEDS_DATA = (
    "this needs the `data` and the `model` of a study, but the study's own code (`@hpo.trial`) loads its "
    "data and builds its model."
)


@dataclass(frozen=True)
class DataSet:
    """The checked examples of every split: lists, but training rows of `synthetic` are made when read."""

    tasks: tuple[Task, ...]
    splits: Mapping[str, Sequence[Example]]
    fingerprint: str
    """Hash of all examples: the same content has the same fingerprint at any path."""
    sources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By split, the number of rows of each source, in the order of the rows. Empty: a single source."""
    span_ends: Mapping[str, SpanEnds] = field(default_factory=dict)
    """Counts of the raw spans of each task, in all splits."""

    def evidence_groups(self, split: str) -> list[int]:
        """Return the group of each row of a split, in order, as `hpo.data.groups` numbers them."""
        return groups_of(self.splits[split])

    def odd_spans(self, task: str) -> OddSpans | None:
        """Return the spans of a task with an end inside a word or at a space, if there are many."""
        return self.span_ends[task].odd() if task in self.span_ends else None


def load_data(config: DataConfig) -> DataSet:
    """Read and check the whole data set.

    Raises DataError with the first bad rows, and InputError for a study without data.
    """
    if config.source == NO_DATA:
        raise InputError(NEEDS_DATA)
    if not config.sources:
        return _load_source(config, config.pair_segments)
    loaded = {}
    for source in config.sources:
        try:
            loaded[source.name] = _renamed(_load_source(source, config.pair_segments), source)
        except DataError as error:
            raise DataError(f"source `{source.name}`: {error}") from None
    return _joined(loaded)


def _load_source(config: SourceConfig, pair_segments: tuple[str, str] | None) -> DataSet:
    if config.source == "synthetic":
        return _generate(config)
    try:
        return _load(located(config), pair_segments)
    except OSError as error:
        raise DataError(
            f"{error.filename or config.path}: cannot be read: {error.strerror or error}."
        ) from None


def _load(config: SourceConfig, pair_segments: tuple[str, str] | None) -> DataSet:
    configs, where, ignored = _read_tasks(config)
    for name, of in config.columns.labels.items():
        if name in configs and not isinstance(of, str) and configs[name].classes is None:
            configs[name] = configs[name].model_copy(update={"classes": of})
    if config.source in SOURCES:
        readers = own_readers(config, configs)
    elif config.hub is not None:
        readers = hub_readers(config, config.hub, configs)
    else:
        readers = file_readers(config, configs)
    tasks = tuple(
        replace(task, is_inferred=configs[task.name].has_classes and configs[task.name].classes is None)
        for task in make_tasks(_with_inferred_classes(configs, readers["train"]), where)
    )
    checker = RowChecker(tasks, pair_segments, ignored)
    splits = _checked(readers, checker)
    splits = _drawn_splits(splits, config.validation_fraction, config.test_fraction)
    splits = {split: _limited(rows, getattr(config.limits, split)) for split, rows in splits.items()}
    for split in ("train", "validation"):
        for task in tasks:
            if not any(task.name in example.annotated for example in splits[split]):
                raise DataError(
                    f"{readers.get(split, readers['train']).name}: task `{task.name}` must be annotated in a "
                    f"row of the {split} split, but it is in none of {len(splits[split])} rows. Leave the "
                    "task out or annotate it."
                )
    tasks = _fitted(tasks, splits["train"])
    return DataSet(tasks, splits, _fingerprint(tasks, splits), span_ends=checker.span_ends)


def _generate(config: SourceConfig) -> DataSet:
    limits = {split: getattr(config.limits, split) or sys.maxsize for split in SPLITS}
    sizes = {split: min(getattr(config.synthetic, f"num_{split}"), limits[split]) for split in SPLITS}
    settings = config.synthetic.model_dump(exclude={f"num_{split}" for split in SPLITS})
    made = {split: SyntheticRows(split, size, **settings) for split, size in sizes.items()}
    # The first rows show the distribution; a million need not be made for it.
    tasks = _fitted(parse_tasks(TASKS_JSON, "synthetic"), made["train"][:10_000])
    if settings["look_alikes"] == SyntheticConfig().look_alikes:  # stored studies are older than it
        del settings["look_alikes"]
    fingerprint = _hash(repr((GENERATOR_VERSION, sizes, settings)))
    return DataSet(tasks, {"train": made["train"], **{s: list(made[s]) for s in SPLITS[1:]}}, fingerprint)


def _renamed(data: DataSet, source: NamedSource) -> DataSet:
    """Return the data set with the task names of `source.rename`, and the source's name in ids and groups."""
    names = {task.name: source.rename.get(task.name, task.name) for task in data.tasks}
    if unknown := [name for name in source.rename if name not in names]:
        raise DataError(f"rename.{unknown[0]}: there is no such task.{did_you_mean(unknown[0], [*names])}")
    if len({*names.values()}) < len(names):
        raise DataError(f"rename: two tasks would have one name: {', '.join(names.values())}.")

    def example(row: Example) -> Example:
        return replace(
            row,
            id=f"{source.name}/{row.id}",
            group=None if row.group is None else f"{source.name}/{row.group}",
            labels={names[task]: label for task, label in row.labels.items()},
            annotated=frozenset(names[task] for task in row.annotated),
        )

    tasks = tuple(
        replace(task, name=names[task.name], evidence_for=task.evidence_for and names[task.evidence_for])
        for task in data.tasks
    )
    splits = {split: [example(row) for row in rows] for split, rows in data.splits.items()}
    fingerprint = f"{source.name} {sorted(source.rename.items())} {data.fingerprint}"
    ends = {names[task]: of for task, of in data.span_ends.items()}
    return DataSet(tasks, splits, fingerprint, span_ends=ends)


def _joined(loaded: Mapping[str, DataSet]) -> DataSet:
    """Join the sources. A task must be the same in all sources that have it."""
    tasks: dict[str, Task] = {}
    first: dict[str, str] = {}
    for source, data in loaded.items():
        for task in data.tasks:
            unfitted = replace(task, target_mean=0.0, target_std=1.0)
            if tasks.setdefault(task.name, unfitted) != unfitted:
                raise DataError(
                    f"data.sources: the task `{task.name}` must be the same in `{first[task.name]}` and "
                    f"`{source}`, with the same labels in the same order, but it differs. Give both the same "
                    f"`tasks`, or set `rename: {{{task.name}: {source}_{task.name}}}` for `{source}`."
                )
            first.setdefault(task.name, source)
    splits: dict[str, list[Example]] = {}
    sizes: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        for name, data in loaded.items():
            if split in data.splits:
                splits.setdefault(split, []).extend(data.splits[split])
                sizes.setdefault(split, {})[name] = len(data.splits[split])
    ends: dict[str, SpanEnds] = {}
    for data in loaded.values():
        for name, counts in data.span_ends.items():
            ends.setdefault(name, SpanEnds()).merge(counts)
    fingerprint = _hash(repr([data.fingerprint for data in loaded.values()]))
    return DataSet(_fitted([*tasks.values()], splits["train"]), splits, fingerprint, sizes, ends)


# Tasks


def _read_tasks(config: SourceConfig) -> tuple[dict[str, TaskConfig], str, Mapping[str, TaskConfig]]:
    """Return the tasks, their location, and the data's tasks that the study ignores."""
    default = None if config.path is None else config.path / "tasks.json"
    if isinstance(config.tasks, Mapping):
        configs = read_task_configs(config.tasks, "data.tasks")
        others = _tasks_of_file(default) if default is not None and default.is_file() else {}
        return configs, "data.tasks", {name: others[name] for name in others if name not in configs}
    path = config.tasks or default
    assert path is not None  # DataConfig has checked it.
    if not path.is_file():
        raise DataError(
            f"{path}: no such file. It must name the tasks, or give them in the study's `data.tasks`."
            f"{nearest_file(path)}"
        )
    return _tasks_of_file(path), str(path), {}


def _tasks_of_file(path: Path) -> dict[str, TaskConfig]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: must be JSON, but {error}.") from None
    return read_task_configs(content, str(path))


def _with_inferred_classes(configs: Mapping[str, TaskConfig], train: Reader) -> dict[str, TaskConfig]:
    """Fill in missing classes from the training rows, sorted.

    Evidence without span names is evidence for all classes of its task.
    """
    missing = [name for name, config in configs.items() if config.has_classes and config.classes is None]
    inferred = _classes_of_rows(missing, configs, train) if missing else {}
    completed = dict(configs)
    for name, classes in inferred.items():
        completed[name] = configs[name].model_copy(update={"classes": tuple(sorted(classes))})
    for name, config in completed.items():
        labelled = completed.get(config.evidence_for or "")
        is_evidence = KINDS[config.kind].needed_key == "evidence_for"
        if is_evidence and config.span_names is None and labelled is not None:
            completed[name] = config.model_copy(update={"span_names": labelled.classes})
    return completed


def _classes_of_rows(
    tasks: Sequence[str], configs: Mapping[str, TaskConfig], train: Reader
) -> dict[str, set[str]]:
    """Return the classes of the training rows by task. Raises DataError if they are too few."""
    inferred: dict[str, set[str]] = {name: set() for name in tasks}
    sizes = defaultdict[str, set[int]](set)
    num_rows, problems = 0, list[tuple[str, str]]()
    _logger.info("reading the classes of %s", train.name)
    for row in train.rows():
        num_rows += 1
        problems += [(row.where, problem) for problem in row.problems]
        labels = row.row.get("labels") if isinstance(row.row, dict) else None
        for name in tasks:
            value = labels.get(name) if isinstance(labels, dict) else None
            sizes[name].update([len(value)] if isinstance(value, list) else ())
            for one in map(class_name, value if isinstance(value, list) else [value]):
                if isinstance(one, str) and one:
                    inferred[name].add(one)
                elif one is not None:
                    problems.append((row.where, f"labels.{name}{not_classes('one class', one)}"))
    if not num_rows:
        raise _empty_split(train, "train")
    for name, classes in inferred.items():
        if is_multi_hot(classes, sizes[name]):
            raise DataError(f"{train.name}: task `{name}`: {MULTI_HOT}, or a column each in `data.columns`.")
        if len(classes) < (least := KINDS[configs[name].kind].min_labels):
            if problems:
                raise _bad_rows(problems)
            raise DataError(
                f"{train.name}: task `{name}` must have at least {least} class{'es' * (least > 1)}, but its "
                f"rows have {show(sorted(classes))}. Label more rows, or give the task its `classes`."
            )
    return inferred


def _fitted(tasks: Sequence[Task], train: Sequence[Example]) -> tuple[Task, ...]:
    return tuple(kind_of(task).fitted(train) for task in tasks)


# Splits


def _checked(readers: Mapping[str, Reader], checker: RowChecker) -> dict[str, list[Example]]:
    numbers = defaultdict[str, dict[str, Any]](dict)
    problems: list[tuple[str, str]] = []
    splits: dict[str, list[Example]] = {split: [] for split in readers}
    first_rows: dict[str, str] = {}
    group_split: dict[str, str] = {}
    for split, reader in readers.items():
        _logger.info("reading %s", reader.name)
        for row in reader.rows():
            example, wrong = (None, row.problems) if row.problems else checker.check(row.row, row.span_tasks)
            if example is not None:
                name, group = example.id, example.group
                if (first := first_rows.setdefault(name, row.where)) is not row.where:
                    wrong = [f"`id` must be unique, but `{name}` is that of {first} too"]
                elif group is not None and (other := group_split.setdefault(group, split)) != split:
                    wrong = [f"a group must stay in one split, but `{group}` is in {other} and {split}"]
                else:
                    splits[split].append(example)
                    for task, text, found in row.numbers:
                        if found.get(".") != found.get(","):
                            key = row.where if len(found) == 2 else next(iter(found))
                            numbers[task].setdefault(key, (f"`{text}` ({row.where})", found, example.labels))
            problems += [(row.where, problem) for problem in wrong]
    if problems:
        raise _bad_rows(problems)
    for task, of in numbers.items():
        give_one_reading(task, of)
    for split, examples in splits.items():
        if not examples:
            raise _empty_split(readers[split], split)
    return splits


def _bad_rows(problems: Sequence[tuple[str, str]]) -> DataError:
    """Return the error for problems of rows (location, problem)."""
    num = len({where for where, _ in problems})
    rows = "1 bad row" if num == 1 else f"{num:,} bad rows"
    return DataError(f"{rows} in the data; mend or remove:{problem_list(problems)}")


def _empty_split(reader: Reader, split: str) -> DataError:
    return DataError(f"{reader.name}: the {split} split must have rows, but it is empty.")


def _hash(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _hash01(purpose: str, key: str) -> float:
    """Return a number in [0, 1) that depends on the two strings alone."""
    return int.from_bytes(hashlib.blake2b(f"{purpose}\0{key}".encode(), digest_size=8).digest()) / 2**64


def _drawn_splits(
    splits: Mapping[str, list[Example]], validation_fraction: float, test_fraction: float
) -> dict[str, list[Example]]:
    shares = {"validation": validation_fraction, "test": test_fraction}
    shares = {split: share for split, share in shares.items() if share and split not in splits}
    drawn: dict[str, list[Example]] = {split: [] for split in ("train", *shares)}
    for example in splits["train"]:
        position = _hash01("split", example.group or example.id)
        for split, share in shares.items():
            position -= share
            if position < 0:
                drawn[split].append(example)
                break
        else:
            drawn["train"].append(example)
    for split, share in shares.items():
        if not drawn[split]:
            drawn[split], drawn["train"] = _split_off(drawn["train"], share * len(splits["train"]))
    for split, examples in drawn.items():
        if not examples:
            num = len({example.group for example in splits["train"]} - {None})
            of_groups = f" with {num} group{'s' * (num > 1)}" if num else ""
            raise DataError(
                f"{len(splits['train'])} training rows{of_groups} are too few to draw a {split} split from. "
                f"Give a {split} file or change data.{'validation' if split == 'train' else split}_fraction."
            )
    made = {**splits, **drawn}
    return {split: made[split] for split in SPLITS if split in made}


def _split_off(examples: Sequence[Example], wanted: float) -> tuple[list[Example], list[Example]]:
    """Return the group with a number of rows next to `wanted`, or no row without groups, and all others."""
    sizes = Counter(example.group for example in examples if example.group)
    far = {group: (abs(size - wanted), _hash01("split", group)) for group, size in sizes.items()}
    group = min(far, key=lambda one: far[one], default="")
    return [row for row in examples if row.group == group], [row for row in examples if row.group != group]


def _limited(examples: list[Example], limit: int | None) -> list[Example]:
    if limit is None or limit >= len(examples):
        return examples
    by_hash = sorted(range(len(examples)), key=lambda i: _hash01("limit", examples[i].id))
    return [examples[i] for i in sorted(by_hash[:limit])]


def _fingerprint(tasks: Sequence[Task], splits: Mapping[str, Iterable[Example]]) -> str:
    primary = [task.primary for task in tasks]
    digest = hashlib.blake2b(f"{tasks!r}{primary if any(primary) else ''}".encode(), digest_size=16)
    for split, examples in splits.items():
        digest.update(split.encode())
        for example in examples:
            # A set's order changes from process to process, so it is sorted.
            truth = (example.labels, example.spans, example.alt_spans, sorted(example.annotated))
            content = (example.id, example.text, example.segments, example.group, truth)
            digest.update(repr(content).encode(errors="surrogatepass"))
    return digest.hexdigest()
