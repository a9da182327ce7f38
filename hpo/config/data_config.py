"""The data of a study: source, files, columns, tasks, limits, and the cutting of long texts."""

import codecs
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    field_validator,
)

from hpo.config.study_file import CheckedSection, Problem, one_of, refuse, show
from hpo.extensions import NO_DATA, SOURCES, Source, has_own_loop, or_own
from hpo.section import Count, Section, Switch, Whole
from hpo.tasks.kind import KINDS, known_kind


def _path(value: Any, info: ValidationInfo) -> Any:
    """Return an absolute path. A path of a study file is relative to the file."""
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise ValueError(f"must be a path, but got {show(value)}.")
    folder = (info.context or {}).get("folder", Path())
    return Path(folder, Path(value).expanduser()).absolute()


def _hub_name(value: Any, info: ValidationInfo) -> Any:
    """Return an id of the hub, or an absolute folder."""
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


def _kind(name: Any) -> Any:
    if not KINDS.accepts(name):
        raise ValueError(one_of(list(KINDS), name))
    return name


class TaskConfig(CheckedSection):
    """A task, in `tasks.json` or in the study file. Other keys are descriptions for people."""

    model_config = ConfigDict(extra="allow")

    kind: Annotated[str, BeforeValidator(_kind)]
    """One of `hpo.tasks.kind.KINDS`."""
    classes: Names | None = None
    """Classes of single_label and multi_label. Default: those of the training rows. For a column of tags that
    holds numbers: the tags 0, 1, ..."""
    span_names: Names | None = None
    """Names of the spans of a task. Default for span_per_label: the classes."""
    evidence_for: str | None = None
    """The task with the classes for whose evidence span_per_label looks."""
    spans_may_overlap: bool = False
    inside_segment: str | None = None
    """Segment with the span of span_extraction."""
    primary_metric: str | None = None
    """Metric for `score` and comparisons. Default: the first metric of the kind."""
    target: Literal["standardize", "log1p"] = "standardize"
    """The head of a regression predicts the standardised number, or the standardised log(1 + number)."""

    @property
    def has_classes(self) -> bool:
        return known_kind(self.kind).has_classes

    def problems(self) -> Iterator[Problem]:
        for key in self.model_extra or ():
            if near := get_close_matches(key, type(self).model_fields, n=1, cutoff=0.8):
                yield Problem((key,), f"there is no such key. Did you mean `{near[0]}`?")
        kind = known_kind(self.kind)
        if kind.needed_key is not None and getattr(self, kind.needed_key) is None:
            yield Problem((kind.needed_key,), f"must be given for the kind {kind.name}.")
        if self.target != "standardize" and not kind.is_number:
            yield Problem(("target",), "must be `standardize` for a kind without numbers.")
        most, num_names = kind.max_span_names, len(self.span_names or ())
        if most is not None and num_names > most:
            message = f"must hold at most {most} for the kind {kind.name}, but got {num_names}."
            yield Problem(("span_names",), f"{message} Use token_classification for several.")


def _name(name: str, of: str = "source") -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ValueError(f"a {of}'s name must be a letter followed by letters, digits, `_` or `-`.")
    return name


def _task_name(name: str) -> str:
    _name(name, "task")
    if name == "score":
        raise ValueError("`score` names the objective over all tasks. Give the task another name.")
    return name


_TASKS = TypeAdapter(dict[Annotated[str, AfterValidator(_task_name)], TaskConfig])


def task_configs(tasks: Mapping[str, Any]) -> dict[str, TaskConfig]:
    """Return the validated tasks by name. Raises pydantic's ValidationError with all problems."""
    if not tasks:
        refuse(Problem((), "there must be at least one task."))
    return _TASKS.validate_python(dict(tasks))


class FilesConfig(Section):
    """One file for each split, for files with other names."""

    train: StudyPath | None = None
    validation: StudyPath | None = None
    test: StudyPath | None = None


def _texts(value: Any) -> Any:
    if isinstance(value, list | tuple):
        names = tuple(str(name) if type(name) is int else name for name in value)
        if len(names) == 2 and names[0] != names[1]:
            return names
    elif isinstance(value, str) or type(value) is int:
        return str(value)
    raise ValueError(f"must be a column, or [first, second] for pairs of texts, but got {show(value)}.")


Column = Annotated[str, BeforeValidator(lambda name: str(name) if type(name) is int else name)]


class ColumnsConfig(CheckedSection):
    """Columns of csv, parquet and hub, flat keys of jsonl, or numbered columns of conll.

    Names, or numbers from 0 with `csv: {header: false}`.
    """

    id: Column | None = None
    """Column with a unique id. Default: the number of the row."""
    text: Annotated[str | tuple[str, str], BeforeValidator(_texts)] = "text"
    """Column with the text, or two columns with a pair of texts: `[premise, hypothesis]`."""
    group: Column | None = None
    """Column with the group, as text or a whole number: the same for rows of one author, patient or document.
    They stay in one split, and are one piece of evidence. A row with an empty cell is its own group. For
    conll: `document`, the sentences after a line of -DOCSTART- or `# newdoc`."""
    tokens: Column | None = None
    """Column with a list of tokens, instead of `text`: the text is the tokens with one space between them."""
    tags: dict[str, Column] = Field(default_factory=dict)
    """Task to column with a list of tags, one for each token: BIO, IOB1, IOB2, BILOU or IOBES."""
    labels: dict[str, Column | Annotated[tuple[Column, ...], Field(strict=False)]] = Field(
        default_factory=dict
    )
    """Task to column. A cell has a class or number, or several classes: a list or `a|b`. Several columns are
    the classes of a `multi_label` task, with 0 or 1 in their cells."""
    spans: dict[str, Column] = Field(default_factory=dict)
    """Task to column of spans: `{name: [[start, end], ...]}`, or `[[start, end], ...]` for one span name. A
    span is the characters `text[start:end]`: counts start at 0, and `end` is excluded."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns with the text of a row."""
        return (self.tokens or self.text,) if isinstance(self.text, str) else self.text

    def problems(self) -> Iterator[Problem]:
        if isinstance(self.text, tuple) and (self.spans or self.tokens):
            message = "must be one column with spans or tokens. Spans in pairs need `pair_segments` of jsonl."
            yield Problem(("text",), message)
        if (self.tags and not self.tokens) or (self.tokens and self.text != "text"):
            yield Problem(("tokens",), "must be given with `tags`, and replaces `text`.")


def _one_character(given: str) -> str:
    if given == "tab":
        return "\t"
    if len(given) != 1 or given in '"\r\n':
        raise ValueError(f"must be one character, or `tab`, but got {show(given)}.")
    return given


def _encoding(name: str) -> str:
    try:
        codecs.lookup(name)
        "".encode(name)
    except (LookupError, ValueError):
        raise ValueError(
            f"must be an encoding of Python, such as utf-8, utf-16 or cp1252, but got {show(name)}."
        ) from None
    return name


Character = Annotated[str, AfterValidator(_one_character)]


class CsvConfig(Section):
    """Format of csv files (csv, and csv files of hub)."""

    delimiter: Character | None = None
    """Delimiter of cells: a character, or `tab`. Default: `,`, `;`, tab or `|`, detected from the columns."""
    list_separator: Character | None = None
    """Separator of classes in a cell without a JSON list. Default: `|`."""
    header: Switch = True
    """False: the first line is a row, and the columns have the numbers 0, 1, 2 ... or `names`."""
    names: Names | None = None
    """Names of all columns in the order of the file, with `header: false`."""
    encoding: Annotated[str, AfterValidator(_encoding)] | None = None
    """Encoding, such as cp1252 or utf-16. Default: UTF-8."""
    empty: Literal["none", "unlabelled"] = "none"
    """Meaning of an empty cell for a multi_label task: no class, or an unlabelled row. For other tasks an
    empty cell is an unlabelled row."""


class HubConfig(Section):
    """A data set on the Hugging Face hub."""

    name: Annotated[str, BeforeValidator(_hub_name)]
    """Id of the data set, or a local folder that `datasets` loads."""
    config: str | None = None
    """Configuration of the data set."""
    revision: str | None = None
    """Commit, tag or branch."""
    splits: dict[Literal["train", "validation", "test"], str] = Field(default_factory=dict)
    """Split of the study to split of the data set. Default: the same names."""


class LimitsConfig(Section):
    """Largest number of examples of each split."""

    train: Count | None = None
    validation: Count | None = None
    test: Count | None = None


class SyntheticConfig(CheckedSection):
    """Generator of clinical-style posts with criteria and evidence."""

    num_train: Count = 2000
    num_validation: Count = 300
    num_test: Count = 300
    seed: Whole = Field(0, ge=0)
    """Seed of the generator."""
    min_sentences: Count = 2
    """Sentences of the shortest posts."""
    max_sentences: Count = 6
    """Sentences of the longest posts, or more if evidence needs it."""
    label_noise: float = Field(0.02, ge=0, le=1)
    """Probability of a missing label of a criterion."""
    look_alikes: float = Field(0.45, ge=0, le=1)
    """Share of sentences without evidence that resemble it: denied, past or another person's."""

    def problems(self) -> Iterator[Problem]:
        if self.min_sentences > self.max_sentences:
            given = f"{self.min_sentences} and {self.max_sentences}"
            yield Problem(("min_sentences",), f"`min_sentences <= max_sentences` must hold, but got {given}.")


def _is_own_source(name: object) -> bool:
    return SOURCES.accepts(name) or (name == NO_DATA and has_own_loop())


class SourceConfig(CheckedSection):
    """A source of examples."""

    OWN: ClassVar[str] = "of your own code"
    SOURCES_OF: ClassVar[dict[str, tuple[str, ...]]] = {
        "synthetic": ("synthetic",),
        "path": ("jsonl", "csv", "parquet", "conll"),
        "files": ("jsonl", "csv", "parquet", "conll"),
        "tasks": ("jsonl", "csv", "parquet", "conll", "hub", OWN),
        "columns": ("jsonl", "csv", "parquet", "conll", "hub"),
        "csv": ("csv", "hub"),
        "hub": ("hub",),
        "options": (OWN,),
    }
    """Keys of some sources only, with these sources."""

    source: Annotated[Source, or_own(_is_own_source)] | None = None
    """Kind of source. Required without `sources`."""
    path: StudyPath | None = None
    """Folder with `train`, `validation` and `test` files (jsonl, csv, parquet, conll)."""
    files: FilesConfig = Field(default_factory=FilesConfig)
    """Files with other names than `train`, `validation` and `test`."""
    tasks: Path | dict[str, Any] | None = None
    """Tasks: a path, or `{task: {kind: ..., classes: [...]}}`. Default: the `tasks.json` in `path`."""
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    """Names of columns (csv, parquet, hub) or flat keys (jsonl); numbers of columns (conll)."""
    csv: CsvConfig = Field(default_factory=CsvConfig)
    """Format of csv files (csv, and csv files of hub)."""
    hub: HubConfig | None = None
    """Data set on the hub."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a source of your own code."""
    synthetic: SyntheticConfig = Field(default_factory=SyntheticConfig)
    """Sizes and seed of the generator."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """Use only a part of the examples."""
    validation_fraction: float = Field(0.1, gt=0, lt=1)
    """Share of training examples for validation if there is no validation split."""
    test_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of training examples for testing if there is no test split."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _check_tasks(cls, value: Any, info: ValidationInfo) -> Any:
        """Return a path, or tasks in the form of a `tasks.json`: `{"tasks": {name: task}}`."""
        if value is None or isinstance(value, (str, Path)):
            return None if value is None else _path(value, info)
        if not isinstance(value, Mapping):
            raise ValueError(f"must be a path or a mapping of task names to tasks, but got {show(value)}.")
        wrapped = isinstance(value.get("tasks"), Mapping) and "kind" not in value["tasks"]
        task_configs(value["tasks"] if wrapped else value)
        return dict(value) if wrapped else {"tasks": dict(value)}

    @field_validator("options")
    @classmethod
    def _check_options(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Validate the options if the code of the source is in use."""
        own = SOURCES.get(info.data.get("source", ""))
        if own is None:
            return given
        options = own.options.model_validate(given, context=info.context)
        return {name: getattr(options, name) for name in given}

    @classmethod
    def unread_keys(cls, source: str) -> list[str]:
        """Return the keys without a meaning for this source."""
        kind = source if source in get_args(Source) else cls.OWN
        return [key for key, sources in cls.SOURCES_OF.items() if kind not in sources]

    def is_default(self, key: str) -> bool:
        return bool(getattr(self, key) == type(self).model_fields[key].get_default(call_default_factory=True))

    def problems(self) -> Iterator[Problem]:
        if self.source is None:
            yield Problem(("source",), "must be given.")
            return
        for key in self.unread_keys(self.source):
            if not self.is_default(key):
                sources = ", ".join(self.SOURCES_OF[key])
                message = f"is read with source {sources}, but the source is {self.source}."
                yield Problem((key,), message + _TWO_COLUMNS * (key == "pair_segments"))
        if self.source in self.SOURCES_OF["path"] and self.path is None:
            if self.files.train is None:
                yield Problem(("path",), f"must be given for {self.source}, or else `files.train`.")
            elif self.tasks is None:
                yield Problem(("tasks",), "must be given where there is no `path` with a tasks.json.")
        if self.csv.names and self.csv.header:
            yield Problem(("csv", "names"), "is read with `header: false`.")
        is_own = self.source not in (*get_args(Source), NO_DATA)
        for key in ("hub", "tasks") if self.source == "hub" else ("tasks",) if is_own else ():
            if getattr(self, key) is None:
                yield Problem((key,), f"must be given for source {self.source}.")
        if self.source == "conll":
            columns, numbers = self.columns, [self.columns.tokens or "", *self.columns.tags.values()]
            others = [columns.id, *columns.labels, *columns.spans, columns.group not in (None, "document")]
            if not columns.tags or any(others) or not all(re.fullmatch(r"-?\d+", one) for one in numbers):
                message = "must be as {tokens: 0, tags: {TASK: -1}, group: document} for conll, in numbers."
                yield Problem(("columns",), message)
        if self.validation_fraction + self.test_fraction >= 1:
            yield Problem(("test_fraction",), "validation and test must leave a part for training.")

    def read_by(self, dumped: dict[str, Any]) -> dict[str, Any]:
        """Return `dumped`, this section as JSON, without keys of other sources."""
        unread = self.unread_keys(self.source or "")
        return {key: value for key, value in dumped.items() if key not in unread}


_TWO_COLUMNS = " Two columns of texts are `columns: {text: [first, second]}`."


class NamedSource(SourceConfig):
    """One of several sources: the keys of `data`, and these."""

    name: Annotated[str, AfterValidator(_name)]
    """Name of the source, and prefix of its ids: `news/17`."""
    rename: dict[str, Annotated[str, AfterValidator(_task_name)]] = Field(default_factory=dict)
    """Task of this source to a new name, if two sources have different tasks of one name."""


class DataConfig(SourceConfig):
    """The data set."""

    SOURCES_OF: ClassVar[dict[str, tuple[str, ...]]] = {
        **SourceConfig.SOURCES_OF,
        "pair_segments": ("jsonl",),
        "sources": (),
    }

    long_text: Literal["truncate", "window"] = "truncate"
    """Longer texts than `max_length`: cut them, or split them into overlapping windows."""
    stride: Annotated[Whole, Field(ge=0)] | None = None
    """Overlap of windows in tokens, at most half of `max_length`. Default: a quarter of `max_length`, at most
    64."""
    pair_segments: Annotated[tuple[str, str], Field(strict=False)] | None = None
    """Two named segments of the text, to be encoded as a pair (jsonl). For two columns see `columns.text`."""
    sources: Annotated[tuple[NamedSource, ...], Field(strict=False)] = ()
    """Several data sets, each with its tasks. A shared task with the same labels is one task."""

    def stride_of(self, max_length: int) -> int:
        """Return the overlap of windows of `max_length` tokens."""
        return min(64, max_length // 4) if self.stride is None else self.stride

    @property
    def pair(self) -> tuple[str, str] | None:
        """Names of the two texts of a row: the columns or the segments, if texts are pairs."""
        texts = (one.columns.text for one in (self, *self.sources))
        return next((one for one in texts if isinstance(one, tuple)), self.pair_segments)

    def problems(self) -> Iterator[Problem]:
        if self.pair_segments not in (None, self.pair):
            yield Problem(("pair_segments",), f"must be left out beside columns.{_TWO_COLUMNS}")
        if not self.sources:
            yield from super().problems()
            return
        for key in SourceConfig.model_fields:
            if not self.is_default(key):
                yield Problem((key,), "must be given in each of `sources`, not outside them.")
        names = [one.name for one in self.sources]
        if len({one.columns.text for one in self.sources if isinstance(one.columns.text, tuple)}) > 1:
            yield Problem(("sources",), "must have the same two columns of texts. Rename those of the files.")
        for index, one in enumerate(self.sources):
            if one.name in names[:index]:
                yield Problem(("sources", index, "name"), f"{show(one.name)} is there twice. Rename one.")
            if self.pair_segments and one.source != "jsonl":
                message = f"is read with source jsonl, but the source {show(one.name)} is {one.source}."
                yield Problem(("pair_segments",), message + _TWO_COLUMNS)

    def read_by(self, dumped: dict[str, Any]) -> dict[str, Any]:
        if not self.sources:
            return super().read_by(dumped)
        each = zip(self.sources, dumped["sources"], strict=True)
        of_all = {key: value for key, value in dumped.items() if key not in SourceConfig.model_fields}
        return of_all | {"sources": [one.read_by(of_one) for one, of_one in each]}
