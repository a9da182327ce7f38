"""Which data a study trains on: where it is, which columns hold what, how much of it, how texts are cut."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hpo.config.study_file import Problem, problems_of, refused, show, validation_error
from hpo.section import Count, Section, Whole

TaskKind = Literal[
    "single_label",
    "multi_label",
    "token_classification",
    "span_extraction",
    "span_per_label",
    "regression",
]
TASK_KINDS: tuple[str, ...] = get_args(TaskKind)


def _path(value: Any, info: ValidationInfo) -> Any:
    """A path of a study file is relative to that file."""
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise ValueError(f"must be a path, but got {show(value)}.")
    folder = (info.context or {}).get("folder", Path())
    return Path(folder, Path(value).expanduser()).absolute()


def _hub_name(value: Any, info: ValidationInfo) -> Any:
    """An id of the hub, or a folder, which as every path of a study file is relative to that file."""
    folder = (info.context or {}).get("folder")
    if folder is not None and isinstance(value, str) and value and Path(folder, value).is_dir():
        return str(Path(folder, value).absolute())
    return value


StudyPath = Annotated[Path, BeforeValidator(_path)]


def _names(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or not all(names):
        raise ValueError("must hold at least one name, and no empty one.")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"must not repeat a name, but {show(twice[0])} occurs twice.")
    return names


Names = Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_names)]


class TaskConfig(Section):
    """One task, in `tasks.json` or in the study file. Other keys describe the data for people."""

    model_config = ConfigDict(extra="allow")

    kind: TaskKind
    classes: Names | None = None
    """Of single_label and multi_label; left out, those of the training rows."""
    span_names: Names | None = None
    """Of the kinds whose truth is spans; of span_per_label, left out, the classes."""
    evidence_for: str | None = None
    """Of span_per_label: the task whose classes the spans are evidence for."""
    spans_may_overlap: bool = False
    inside_segment: str | None = None
    """Of span_extraction: the segment that the span lies in."""
    max_spans: int | None = None

    @property
    def has_classes(self) -> bool:
        return self.kind in ("single_label", "multi_label")

    @model_validator(mode="after")
    def _check_keys(self) -> TaskConfig:
        known = list(type(self).model_fields)
        problems = [
            Problem((key,), f"there is no such key. Did you mean `{near[0]}`?")
            for key in self.model_extra or ()
            if (near := get_close_matches(key, known, n=1, cutoff=0.8))
        ]
        of_kind = {
            "token_classification": ("span_names",),
            "span_extraction": ("span_names",),
            "span_per_label": ("evidence_for",),
        }
        problems += [
            Problem((key,), f"must be given for the kind {self.kind}.")
            for key in of_kind.get(self.kind, ())
            if getattr(self, key) is None
        ]
        if self.kind == "span_extraction" and (
            self.max_spans not in (None, 1) or len(self.span_names or "x") > 1
        ):
            message = (
                "span_extraction finds at most one span of one name. Use token_classification for several."
            )
            problems.append(Problem(("kind",), message))
        if problems:
            raise validation_error(problems)
        return self


def task_configs(tasks: Mapping[str, Any]) -> dict[str, TaskConfig]:
    """The checked tasks by name. Raises pydantic's ValidationError with all that is wrong."""
    configs: dict[str, TaskConfig] = {}
    problems = [] if tasks else [Problem((), "there must be at least one task.")]
    for name, content in tasks.items():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", str(name)):
            problems.append(
                Problem((name,), "a task's name must be a letter followed by letters, digits, `_` or `-`.")
            )
        if name == "score":
            message = "`score` names the objective over all tasks. Give the task another name."
            problems.append(Problem((name,), message))
        try:
            configs[name] = TaskConfig.model_validate(content)
        except ValidationError as error:
            found = problems_of(error, TaskConfig, content)
            problems += [Problem((name, *problem.where), problem.message) for problem in found]
    if problems:
        raise validation_error(problems)
    return configs


class FilesConfig(Section):
    """One file for each split, where they do not have the usual names."""

    train: StudyPath | None = Field(None, description="Training split.")
    validation: StudyPath | None = Field(None, description="Validation split.")
    test: StudyPath | None = Field(None, description="Test split.")


class ColumnsConfig(Section):
    """Which column holds what (csv, parquet, hub)."""

    id: str | None = Field(None, description="Column with a unique id; left out, the row's number.")
    text: str = Field("text", description="Column with the text.")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Task name to column: a class or number; several classes as a list or `a|b`.",
    )
    spans: dict[str, str] = Field(
        default_factory=dict, description="Span or task name to column of spans, as `[[start, end], ...]`."
    )


class HubConfig(Section):
    """A data set of the Hugging Face hub."""

    name: Annotated[str, BeforeValidator(_hub_name)] = Field(
        description="Id of the data set, or a local folder that `datasets` loads."
    )
    config: str | None = Field(None, description="Configuration of the data set.")
    revision: str | None = Field(None, description="Commit, tag or branch.")
    splits: dict[Literal["train", "validation", "test"], str] = Field(
        default_factory=dict, description="Split here to split there; left out, the same names."
    )


class LimitsConfig(Section):
    """At most so many examples of a split."""

    train: Count | None = Field(None, description="Training split.")
    validation: Count | None = Field(None, description="Validation split.")
    test: Count | None = Field(None, description="Test split.")


class SyntheticConfig(Section):
    """Generated clinical-style posts with criteria and evidence."""

    num_train: Count = Field(2000, description="Training examples.")
    num_validation: Count = Field(300, description="Validation examples.")
    num_test: Count = Field(300, description="Test examples.")
    seed: Whole = Field(0, ge=0, description="Seed of the generator.")
    min_sentences: Count = Field(2, description="Sentences of the shortest posts.")
    max_sentences: Count = Field(
        6, description="Sentences of the longest posts; more where evidence needs it."
    )
    label_noise: float = Field(0.02, ge=0, le=1, description="Chance that a criterion's label is missed.")

    @model_validator(mode="after")
    def _check_sentences(self) -> SyntheticConfig:
        if self.min_sentences > self.max_sentences:
            came = f"{self.min_sentences} and {self.max_sentences}"
            raise refused(("min_sentences",), f"`min_sentences <= max_sentences` must hold, but got {came}.")
        return self


class DataConfig(Section):
    """The data set."""

    SOURCE_KEYS: ClassVar[dict[str, tuple[str, ...]]] = {
        "synthetic": ("synthetic",),
        "jsonl": ("path", "files", "tasks"),
        "csv": ("path", "files", "tasks", "columns"),
        "parquet": ("path", "files", "tasks", "columns"),
        "hub": ("hub", "tasks", "columns"),
    }
    source: Literal["synthetic", "jsonl", "csv", "parquet", "hub"] = Field(
        description="Where the examples come from."
    )
    path: StudyPath | None = Field(
        None, description="Folder with `train`, `validation` and `test` files (jsonl, csv, parquet)."
    )
    files: FilesConfig = Field(default_factory=FilesConfig, description="Files with other names.")
    tasks: Path | dict[str, Any] | None = Field(
        None,
        description="The tasks: a path, or `{task: {kind: ..., classes: [...]}}` here. Left out, the "
        "`tasks.json` in `path`.",
    )
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig, description="Columns (csv, parquet, hub).")
    hub: HubConfig | None = Field(None, description="Data set of the hub.")
    synthetic: SyntheticConfig = Field(default_factory=SyntheticConfig, description="Sizes and seed.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="Use only a part.")
    validation_fraction: float = Field(
        0.1, gt=0, lt=1, description="Share of training examples for validation when there is no such split."
    )
    test_fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of training examples for testing when there is no such split."
    )
    long_text: Literal["truncate", "window"] = Field(
        "truncate", description="A text over `max_length`: cut it, or cover it with overlapping windows."
    )
    stride: Annotated[Whole, Field(ge=0)] | None = Field(
        None,
        description="Tokens that neighbouring windows share, at most half of `max_length`. Left out, a "
        "fourth of `max_length`, at most 64.",
    )
    pair_segments: Annotated[tuple[str, str], Field(strict=False)] | None = Field(
        None, description="Two named segments of the text, encoded as a pair."
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _check_tasks(cls, value: Any, info: ValidationInfo) -> Any:
        """Tasks in the study file get the form of a `tasks.json`: `{"tasks": {name: task}}`."""
        if value is None or isinstance(value, (str, Path)):
            return None if value is None else _path(value, info)
        if not isinstance(value, Mapping):
            raise refused((), f"must be a path or a mapping of task names to tasks, but got {show(value)}.")
        wrapped = isinstance(value.get("tasks"), Mapping) and "kind" not in value["tasks"]
        tasks, above = (value["tasks"], ("tasks",)) if wrapped else (value, ())
        try:
            task_configs(tasks)
        except ValidationError as error:
            found = problems_of(error, None, tasks)
            problems = [Problem((*above, *problem.where), problem.message) for problem in found]
            raise validation_error(problems) from None
        return dict(value) if wrapped else {"tasks": dict(value)}

    def stride_of(self, max_length: int) -> int:
        """Tokens that neighbouring windows of `max_length` tokens share."""
        return min(64, max_length // 4) if self.stride is None else self.stride

    @classmethod
    def unread_keys(cls, source: str) -> list[str]:
        """The keys that say where examples are, but not those of this source."""
        return sorted({*chain.from_iterable(cls.SOURCE_KEYS.values())} - {*cls.SOURCE_KEYS[source]})

    @model_validator(mode="after")
    def _check_source(self) -> DataConfig:
        problems = []
        for key in self.unread_keys(self.source):
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                users = ", ".join(source for source, keys in self.SOURCE_KEYS.items() if key in keys)
                message = f"is read with source {users}, but the source is {self.source}."
                problems.append(Problem((key,), message))
        if "path" in self.SOURCE_KEYS[self.source] and self.path is None:
            if self.files.train is None:
                message = f"must be given for {self.source}, or else `files.train`."
                problems.append(Problem(("path",), message))
            elif self.tasks is None:
                message = "must be given where there is no `path` with a tasks.json."
                problems.append(Problem(("tasks",), message))
        if self.source == "hub":
            missing = [key for key in ("hub", "tasks") if getattr(self, key) is None]
            problems += [Problem((key,), "must be given for source hub.") for key in missing]
        if self.validation_fraction + self.test_fraction >= 1:
            message = "validation and test must leave a part for training."
            problems.append(Problem(("test_fraction",), message))
        if problems:
            raise validation_error(problems)
        return self
