"""Stored record of a detailed evaluation of one model on one split."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hpo.errors import DataError
from hpo.json_safe import json_safe
from hpo.tasks.options import DecodingThresholds

VERSION = 2
"""Version of the form of the record."""
DECIDED_ON = "validation"
"""Split on which a trial chooses its thresholds."""


@dataclass(frozen=True)
class Interval:
    """Value of a metric, and the ends of its interval; None: they are unknown."""

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
    """Rows, or spans, of this class in the truth."""
    num_predicted: int


@dataclass(frozen=True)
class Confusion:
    """Confusion matrix of single_label; of multi_label, pairs of classes true and predicted in one row."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, int, int], ...]
    """(true, predicted, rows) of the pairs that occur, the first two as indices of `labels`."""


@dataclass(frozen=True)
class Mistake:
    """One wrong row."""

    id: str
    text: str
    """At most 1,000 characters: the beginning, or for spans the part with the first wrong one."""
    truth: Any
    """A class, a list of classes, a number, or a list of [name, start, end] in `text`."""
    predicted: Any
    loss: float
    text_start: int = 0
    """Position of `text` in the text of the row, in characters."""
    num_outside: int = 0
    """Number of wrong spans, true or predicted, that are not wholly in `text`."""


@dataclass(frozen=True)
class TaskEvaluation:
    """One task. Parts that its kind does not have are empty or None."""

    kind: str
    num_rows: int
    """Labelled rows."""
    metrics: Mapping[str, Interval]
    threshold: float | None
    """Smallest predicted probability of multi_label and span_per_label."""
    decisions: DecodingThresholds
    classes: tuple[ClassFigures, ...]
    confusion: Confusion | None
    worst: tuple[Mistake, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class DetailedEvaluation:
    """Evaluation of a model's predictions on one split."""

    version: int
    split: str
    num_examples: int
    decided_on: str
    """Split on which the thresholds were chosen; empty if no task has thresholds."""
    num_resamples: int
    level: float
    """Level of the intervals; see `hpo.evaluation.intervals`."""
    score: Interval | None
    """Mean of the tasks' primary metrics."""
    baseline: Mapping[str, float]
    """Best constant predictions on this split (`hpo.evaluation.contributions.baselines`)."""
    tasks: Mapping[str, TaskEvaluation]

    def as_json(self) -> dict[str, Any]:
        """Return the record in plain containers, without NaN."""
        return dict(json_safe(asdict(self)))


def read_document(content: Any) -> Mapping[str, Any]:
    """Return a stored record if it is whole and of this version. Raises DataError."""
    version = content.get("version") if isinstance(content, Mapping) else None
    if version != VERSION:
        raise DataError(f"a detailed evaluation must have the version {VERSION}, but got {version!r}.")
    try:
        _adapter().validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"this is no whole detailed evaluation: {where}: {first['msg']}.") from error
    return dict(content)


@cache
def _adapter() -> TypeAdapter[DetailedEvaluation]:
    return TypeAdapter(DetailedEvaluation)
