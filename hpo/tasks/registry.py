"""The kinds of task by their names: the six of this folder, and those of a study's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hpo.code import Registry
from hpo.extensions import METRICS, add_options
from hpo.tasks.kind import Kind
from hpo.tasks.labels import MultiLabel, SingleLabel
from hpo.tasks.regression import Regression
from hpo.tasks.span_extraction import SpanExtraction
from hpo.tasks.span_per_label import SpanPerLabel
from hpo.tasks.token_classification import TokenClassification

if TYPE_CHECKING:
    from hpo.data.tasks import Task

KINDS = Registry[type[Kind]]("kind of task")

AnyKind = TypeVar("AnyKind", bound=type[Kind])


def register(kind: AnyKind) -> AnyKind:
    """Make a kind known by its name; a decorator of its class, `hpo.kind` in the code of a study. Raises
    ValueError where another kind has the name."""
    KINDS.add(kind.name, kind)
    add_options(kind.name, kind.options)
    return kind


def kind_of(task: Task) -> Kind:
    """What the kind of a task says of it."""
    return KINDS[task.kind](task)


def known_kind(name: str) -> type[Kind]:
    """A kind, perhaps of a stored evaluation; of one that is not known here what all have in common."""
    return KINDS.get(name, Kind)


def is_error(metric: str) -> bool:
    """Whether less of a metric is better, in units of its own; `<task>/<metric>` or its name alone."""
    name = metric.rpartition("/")[2]
    own = METRICS.get(name)
    return (own is not None and own.is_error) or any(name in kind.errors for kind in KINDS.values())


for _kind in (SingleLabel, MultiLabel, TokenClassification, SpanExtraction, SpanPerLabel, Regression):
    register(_kind)
METRICS.reserved = {"score", *(name for kind in KINDS.values() for name in kind.metrics)}
