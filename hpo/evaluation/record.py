"""The stored record of a detailed evaluation of one model on one split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hpo.errors import DataError
from hpo.json_safe import json_safe
from hpo.tasks.options import DecodingThresholds

VERSION = 2
"""Of the form of the record."""
DECIDED_ON = "validation"
"""The split on which a trial chooses its thresholds."""


@dataclass(frozen=True)
class Interval:
    """The value of a metric, and the ends of its interval; None: they are unknown."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ClassFigures:
    """One class, or one span name."""

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int
    """Rows, or spans, that are truly of this class."""
    num_predicted: int


@dataclass(frozen=True)
class Confusion:
    """single_label: the confusion matrix. multi_label: in how many rows class `true` holds and class
    `predicted` is predicted."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, int, int], ...]
    """(true, predicted, rows), the first two as indices of `labels`, of pairs that occur."""


@dataclass(frozen=True)
class Mistake:
    """One row that is wrong."""

    id: str
    text: str
    """At most 1,000 characters: the beginning, or for spans the part in which the first wrong one is."""
    truth: Any
    """A class, a list of classes, a number, or a list of [name, start, end] in `text`."""
    predicted: Any
    loss: float
    text_start: int = 0
    """Where `text` begins in the text of the row, in characters."""
    num_outside: int = 0
    """Wrong spans, of the truth or predicted, that do not lie in `text` as a whole."""


@dataclass(frozen=True)
class TaskEvaluation:
    """One task; what its kind does not have is empty or None."""

    kind: str
    num_rows: int
    """Rows that are annotated for the task."""
    metrics: Mapping[str, Interval]
    threshold: float | None
    """Of multi_label and span_per_label: what has a probability above it is predicted."""
    decisions: DecodingThresholds
    """All that predictions were made with; a kind uses what it needs."""
    classes: tuple[ClassFigures, ...]
    confusion: Confusion | None
    worst: tuple[Mistake, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class DetailedEvaluation:
    """What a model's predictions on one split tell."""

    version: int
    split: str
    num_examples: int
    decided_on: str
    """The split on which the thresholds were chosen."""
    num_resamples: int
    level: float
    """Of the intervals; see `hpo.evaluation.intervals`."""
    score: Interval | None
    """The mean of the tasks' primary metrics."""
    baseline: Mapping[str, float]
    """`hpo.evaluation.contributions.baselines`: the best constant predictions on this split."""
    tasks: Mapping[str, TaskEvaluation]

    def as_json(self) -> dict[str, Any]:
        """The record in plain containers; it holds no NaN."""
        return dict(json_safe(asdict(self)))

    @classmethod
    def from_json(cls, content: Any) -> DetailedEvaluation:
        """Undo `as_json`. Raises DataError for what is no such record, or one of another version."""
        if not isinstance(content, Mapping) or content.get("version") != VERSION:
            version = content.get("version") if isinstance(content, Mapping) else None
            came = "has none" if version is None else f"has {version!r}"
            raise DataError(f"a detailed evaluation must have the version {VERSION}, but this one {came}.")
        try:
            return _adapter().validate_python(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            problem = f"{where}: {first['msg']}" if where else first["msg"]
            raise DataError(f"this is no whole detailed evaluation: {problem}.") from error


def read_document(content: Any) -> Mapping[str, Any]:
    """Return a stored record if it is whole and of this version. Raises DataError."""
    DetailedEvaluation.from_json(content)
    return dict(content)


@cache
def _adapter() -> TypeAdapter[DetailedEvaluation]:
    return TypeAdapter(DetailedEvaluation)
