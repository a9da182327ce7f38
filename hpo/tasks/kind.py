"""A task and its kind: one class per kind, for everything that depends on it.

The package has six kinds, and `KINDS` maps their names to them. The layout of their logits and targets:

    kind                  logits        target                      missing  an item is
    single_label          [B, C]        int64 [B]                   -100     a row
    multi_label           [B, C]        float32 [B, C] in {0, 1}    -1       a row
    regression            [B, 1]        float64 [B], raw units      NaN      a row
    token_classification  [B, L, 2N+1]  int64 [B, L]                -100     a token
      spans may overlap   [B, L, 3N]    int64 [B, L, N]             -100     a token
    span_extraction       [B, L, 2]     int64 [B, 2], inclusive     -100     a row
    span_per_label        [B, L, C]     float32 [B, L, C] in {0, 1} -1       a token and class
"""

from __future__ import annotations

import math
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hpo.code import Registry
from hpo.errors import shorten
from hpo.extensions import METRICS, add_options, metrics_of
from hpo.section import Section
from hpo.tasks.example import Example, Label
from hpo.tasks.options import DecodingThresholds, LossOptions
from hpo.tasks.tokenized_split import AnyArray, BoolArray, IntArray, TokenizedSplit, WindowSpans

ByName = Mapping[str, NDArray[np.floating[Any]]]
Counts = tuple[NDArray[np.floating[Any]], ...]
Predicted = Sequence[Any] | None
RowValues = tuple[dict[str, Any], dict[str, NDArray[np.floating[Any]]]]
Likely = NDArray[np.float64] | None
Scores = dict[str, NDArray[np.floating[Any]]]
RowSpans = Sequence[tuple[int, int, str]]
RowLabels = Mapping[str, Label]
Segments = Mapping[str, tuple[int, int]]

IGNORE_INDEX = -100

FloatArray = NDArray[np.floating[Any]]

Span = tuple[str, int, int]
"""Name, first character and end of a span; the end is one past its last character."""


@dataclass(frozen=True)
class Task:
    """One task of a data set.

    `labels` are the classes, or the span names for the kinds whose truth is spans; empty for regression.
    `target_mean` and `target_std` are those of the train split; a regression head predicts
    `(target - target_mean) / target_std`, so that its loss is of the size of the others.
    """

    name: str
    kind: str
    labels: tuple[str, ...] = ()
    evidence_for: str | None = None
    spans_may_overlap: bool = False
    inside_segment: str | None = None
    target_mean: float = 0.0
    target_std: float = 1.0
    primary: str | None = field(default=None, repr=False)  # of no row: fingerprints of data go without it
    """The primary metric, where it is not the first."""
    is_inferred: bool = field(default=False, repr=False, compare=False)
    """The classes are those of the training rows, since no place declares them."""

    @property
    def level(self) -> str:
        return KINDS[self.kind].level

    @property
    def num_outputs(self) -> int:
        return kind_of(self).num_outputs

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `hpo.training.metrics.score` gives, the primary one first."""
        names = dict.fromkeys([self.primary, *KINDS[self.kind].metrics, *metrics_of(self.kind)])
        return tuple(name for name in names if name is not None)

    @property
    def primary_metric(self) -> str:
        return self.metrics[0]


class Kind(ABC):
    """A kind, made for one task."""

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    """Names of its metrics, the primary one first."""
    losses: ClassVar[tuple[str, ...]]
    """Values of the setting `loss` that fit it; the first is its `auto`."""
    level: ClassVar[Literal["sequence", "token"]] = "sequence"
    """Whether logits are one vector a window or one a token."""
    has_classes: ClassVar[bool] = False
    """Whether its truth is a class of a row, or where `is_list` a list of classes."""
    is_list: ClassVar[bool] = False
    is_number: ClassVar[bool] = False
    in_spans: ClassVar[bool] = False
    """Whether its truth is spans, or a label otherwise."""
    is_by_row: ClassVar[bool] = True
    """Whether a row has a class or span name once at most, so that what is counted is rows."""
    has_threshold: ClassVar[bool] = False
    """Whether what has a probability above `DecodingThresholds.threshold` is predicted."""
    min_labels: ClassVar[int] = 0
    """Fewest classes or span names of a task."""
    max_span_names: ClassVar[int | None] = None
    needed_key: ClassVar[str | None] = None
    """Key that a task's configuration must have."""
    at_first_token: ClassVar[str | None] = None
    """What it marks at the first token of a window, which must be a special one."""
    target_type: ClassVar[str] = "int64"
    """NumPy's name of the type of a batch's targets."""
    proportions: ClassVar[tuple[str, ...]] = ()
    """Metrics that are the share of rows that are right."""
    errors: ClassVar[tuple[str, ...]] = ()
    """Metrics of which less is better, in the units of the labels."""
    options: ClassVar[type[Section]] = Section
    """Settings of its own, `<name>.<option>`: `options.of(name)` in `loss_sum`."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __init_subclass__(cls) -> None:
        """A kind with scores of its own does not inherit the bounds and constants of its parent."""
        super().__init_subclass__()
        if "scores" in vars(cls):
            for name in ("proportions", "bounded", "row_bound", "constant_rows"):
                if name not in vars(cls):
                    setattr(cls, name, vars(Kind)[name])

    @property
    def num_outputs(self) -> int:
        """Size of the logits' last dimension."""
        return len(self.task.labels)

    # Its truth

    @classmethod
    def from_cell(cls, cell: Any, list_separator: str, *, has_decimal_comma: bool) -> Any:
        """Return a cell of any reader in the form that `label` takes; it is neither null nor blank text.

        `list_separator` stands between classes in a text, and `has_decimal_comma` allows numbers like `1,5`.
        Raises ValueError, whose text follows the label's place, for text that the kind cannot read.
        """
        return cell

    def label(self, value: Any) -> Label:
        """A row's label as an example holds it. Raises ValueError, whose text follows the label's place."""
        return value  # type: ignore[no-any-return]

    def span_problems(self, spans: RowSpans, labels: RowLabels, segments: Segments) -> list[str]:
        """What is wrong with all the spans (start, end, name) of a row together; there are some."""
        return []

    def truth(self, example: Example) -> Any:
        """Of an annotated row, in the form of a prediction."""
        return example.labels[self.task.name]

    def held(self, example: Example) -> Sequence[str]:
        """The classes of an annotated row, or the name of each of its spans; none of a number."""
        return ()

    def fitted(self, train: Sequence[Example]) -> Task:
        """The task with what it must know of the training rows."""
        return self.task

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray | None:
        """The targets of rows, annotated where `has_E`, for all their windows, in a small type; None where
        `window_targets` or `batch_target` makes them of spans."""
        return None

    def window_targets(self, spans: WindowSpans, annotated_W: BoolArray) -> AnyArray | None:
        """The targets of windows with these spans, or None."""
        return None

    def batch_target(self, split: TokenizedSplit, windows_B: IntArray, is_text_BL: BoolArray) -> AnyArray:
        """The target of some windows; `is_text_BL` is true at tokens that are neither special nor padding."""
        return split.targets[self.task.name][windows_B].astype(self.target_type)

    # Its loss

    def initial_bias(self) -> list[float]:
        """What a fresh head's bias starts from: the log-odds of rough priors. [num_outputs]

        One class of a multi_label task holds in a row; a token lies in a span of some name with probability
        1/4, in the evidence for a class that holds with 1/10; elsewhere 0. From 0 everywhere, the first steps
        only learn that positives are rare, with gradients so large that Adam's second moments hold back the
        next thousand steps (Lin et al. 2017, arXiv:1708.02002, section 4.1, for detection). On the 17
        overlapping slots of NLU++ two epochs give a span F1 of 0.69 instead of 0.
        """
        return [0.0] * self.num_outputs

    def labelled(self, target: Tensor) -> Tensor:
        """Which items of a target, on the CPU, have any class or name that is labelled."""
        return target >= 0

    @abstractmethod
    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        """As `hpo.training.losses.loss_sum`, of logits in fp32; `options.loss` is one of `losses`."""

    def class_weights(self, targets: Iterable[Tensor]) -> Tensor | None:
        """Those of `class_weighting: balanced` from the train split's targets, on the CPU, of any batching; 1
        for a class that does not occur. None: the kind has no classes."""
        return None

    # Its predictions

    @abstractmethod
    def decode(
        self, logits: FloatArray, split: TokenizedSplit, decision: DecodingThresholds, labels: Predicted
    ) -> list[Any]:
        """One prediction an example: a class, a list of classes, a number in raw units, or a sorted list of
        spans. `labels` are the predictions of the task that they are evidence for, if any."""

    def choose(
        self, logits: FloatArray, split: TokenizedSplit, rows: list[int], metric: str, labels: Predicted
    ) -> DecodingThresholds:
        """The decision that maximises a metric on the annotated `rows`, of which there are some."""
        return DecodingThresholds()

    def probabilities(self, logits: FloatArray, split: TokenizedSplit) -> NDArray[np.float64] | None:
        """Each example's probability of each class: [E, C]. None: it has no classes."""
        return None

    # Its scores

    @abstractmethod
    def row_values(self, predicted: Sequence[Any], examples: Sequence[Example]) -> RowValues:
        """What each annotated row adds to the sums that metrics are made of: `hits`, `true` and `predicted`
        by class or span name, sparse [N, C], if it has any; and all else by name, [N]."""

    @abstractmethod
    def scores(self, rows_B: FloatArray, counts_BC: ByName, sums_B: ByName, whole: Counts) -> Scores:
        """The metrics of sums over so many rows, NaN or infinite where one is not defined. `whole` has the
        counts of the whole split, by class."""

    def whole_scores(self, num_rows: int, counts_NC: Mapping[str, Any], values_N: ByName) -> dict[str, float]:
        """The metrics of all rows, those that are defined."""
        whole = {name: np.asarray(of_rows.sum(axis=0)) for name, of_rows in counts_NC.items()}
        sums = {name: of_rows.sum(keepdims=True) for name, of_rows in values_N.items()}
        counts = {name: count_C[None] for name, count_C in whole.items()}
        values = self.scores(np.array([float(num_rows)]), counts, sums, tuple(whole.values()))
        return {name: float(value_B[0]) for name, value_B in values.items() if np.isfinite(value_B[0])}

    # Its verdicts

    def bounded(self, values_N: ByName) -> Mapping[str, FloatArray]:
        """The values of rows in the form that verdicts judge, in which one row has a limited weight."""
        return dict(values_N)

    def row_bound(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> float:
        """The largest change of a metric that one row can cause, times the number of rows; infinite where it
        is unknown. The values are those of `bounded`."""
        return 1.0 if metric in self.proportions else math.inf

    def constant_rows(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> RowValues | None:
        """The row values of the constant prediction with the best value of a metric, given the row values of
        any predictions. None: the kind has no such prediction."""
        return None

    # What its predictions tell

    def decided_by(self, decision: DecodingThresholds) -> str:
        """What a prediction depends on beside the model, as the end of a sentence's part."""
        return ""

    @abstractmethod
    def row_losses(self, predicted: Sequence[Any], examples: Sequence[Example], p_NC: Likely) -> FloatArray:
        """How bad each row is, 0 where it is right: [N]. `p_NC` are the probabilities of classes, if any."""


KINDS = Registry[type[Kind]]("kind of task")

AnyKind = TypeVar("AnyKind", bound=type[Kind])


def register(kind: AnyKind) -> AnyKind:
    """Make a kind known by its name; a decorator of its class, `hpo.kind` in the code of a study. Raises
    ValueError where another kind has the name."""
    KINDS.add(kind.name, kind)
    add_options(kind.name, kind.options)
    return kind


def kind_of(task: Task) -> Kind:
    """Return the kind of a task, made for the task."""
    return KINDS[task.kind](task)


def known_kind(name: str) -> type[Kind]:
    """Return a kind, or the base class for an unknown one, as of a stored evaluation."""
    return KINDS.get(name, Kind)


def is_error(metric: str) -> bool:
    """Whether less of a metric is better, in units of its own; `<task>/<metric>` or its name alone."""
    name = metric.rpartition("/")[2]
    own = METRICS.get(name)
    return (own is not None and own.is_error) or any(name in kind.errors for kind in KINDS.values())


def class_name(value: Any) -> Any:
    """Return a class as text without outer white space, in Unicode's composed form (NFC).

    Whole numbers and booleans become text too; other values are left as they are. A whole number may be a
    float: pandas makes floats of a column of them that has an empty cell.
    """
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.strip())
    if isinstance(value, float | Decimal) and -(2**53) < value < 2**53 and value % 1 == 0:
        value = int(value)
    return str(value) if isinstance(value, int) else value


def not_classes(form: str, value: Any) -> ValueError:
    """Return the error for a value that is not `form`, such as one class. It follows the place of a label."""
    return ValueError(f" must be {form}, as text or a whole number, but got {shorten(repr(value), 60)}")


def indicators(task: Task, held: Sequence[Sequence[str]]) -> NDArray[np.bool_]:
    """Lists of labels as rows of booleans: [N, C]."""
    index = {label: c for c, label in enumerate(task.labels)}
    ones = [(n, index[label]) for n, of_row in enumerate(held) for label in of_row]
    indicators_NC = np.zeros((len(held), len(index)), bool)
    indicators_NC[tuple(np.array(ones, np.int64).reshape(-1, 2).T)] = True
    return indicators_NC
