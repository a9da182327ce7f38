"""A task and its kind. A kind is one class with everything that depends on it.

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

import math
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from inspect import signature
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hpo.code import Registry
from hpo.errors import DataError, shorten
from hpo.extensions import METRICS, add_options, metrics_of
from hpo.section import Section
from hpo.tasks.example import Example, Label
from hpo.tasks.options import DecodingThresholds, LossOptions
from hpo.tasks.tokenized_split import AnyArray, BoolArray, IntArray, TokenizedSplit, WindowSpans

FloatArray = NDArray[np.floating[Any]]
ByName = Mapping[str, FloatArray]
Counts = tuple[FloatArray, ...]
Predicted = Sequence[Any] | None
RowValues = tuple[dict[str, Any], dict[str, FloatArray]]
Likely = NDArray[np.float64] | None
Scores = dict[str, FloatArray]
RowSpans = Sequence[tuple[int, int, str]]
RowLabels = Mapping[str, Label]
Segments = Mapping[str, tuple[int, int]]

Span = tuple[str, int, int]
"""Name, first character and end of a span; the end is one past its last character."""

IGNORE_INDEX = -100
MULTI_HOT = "rows of 0 and 1 (multi-hot) must be lists with the names of the classes that hold"
BITS = {"0", "1", "False", "True"}


@dataclass(frozen=True)
class Task:
    """One task of a data set.

    `labels` are the classes, or the span names for the kinds with spans; empty for regression. `target_mean`
    and `target_std` describe the train split; a regression head predicts
    `(target - target_mean) / target_std`, so its loss has the size of the others.
    """

    name: str
    kind: str
    labels: tuple[str, ...] = ()
    evidence_for: str | None = None
    spans_may_overlap: bool = False
    inside_segment: str | None = None
    target_mean: float = 0.0
    target_std: float = 1.0
    primary: str | None = field(default=None, repr=False)  # not in the fingerprint of the data
    """The primary metric, if it is not the first."""
    is_inferred: bool = field(default=False, repr=False, compare=False)
    """True if the classes come from the training rows, not from a declaration."""

    @property
    def level(self) -> str:
        return KINDS[self.kind].level

    @property
    def num_outputs(self) -> int:
        return kind_of(self).num_outputs

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics in `hpo.training.metrics.score`, the primary one first."""
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
    """Values of the setting `loss` for this kind; the first is its `auto`."""
    level: ClassVar[Literal["sequence", "token"]] = "sequence"
    """One vector of logits per window, or one per token."""
    has_classes: ClassVar[bool] = False
    """Its truth is a class of a row, or with `is_list` a list of classes."""
    is_list: ClassVar[bool] = False
    is_number: ClassVar[bool] = False
    in_spans: ClassVar[bool] = False
    """Its truth is spans, not a label."""
    is_by_row: ClassVar[bool] = True
    """A row has a class or span name once at most, so counts are of rows."""
    has_threshold: ClassVar[bool] = False
    """It predicts everything with a probability above `DecodingThresholds.threshold`."""
    min_labels: ClassVar[int] = 0
    """Fewest classes or span names of a task."""
    max_span_names: ClassVar[int | None] = None
    needed_key: ClassVar[str | None] = None
    """Required key of a task's configuration."""
    at_first_token: ClassVar[str | None] = None
    """Meaning of the first token of a window, which must be a special one."""
    target_type: ClassVar[str] = "int64"
    """NumPy type of a batch's targets."""
    proportions: ClassVar[tuple[str, ...]] = ()
    """Metrics that are a share of right rows."""
    errors: ClassVar[tuple[str, ...]] = ()
    """Metrics in the units of the labels; less is better."""
    options: ClassVar[type[Section]] = Section
    """Settings of its own, `<name>.<option>`: `options.of(name)` in `loss_sum`."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __init_subclass__(cls) -> None:
        """Reset the bounds and constants of the parent in a kind with its own scores."""
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
        """Return a cell of any reader in the form for `label`; the cell is neither null nor blank.

        `list_separator` stands between classes in a text, and `has_decimal_comma` allows numbers like `1,5`.
        Raises ValueError for unreadable text; the message follows the label's location.
        """
        return cell

    def label(self, value: Any) -> Label:
        """Return the label of an example. Raises ValueError; the message follows the label's location."""
        return value  # type: ignore[no-any-return]

    def span_problems(self, spans: RowSpans, labels: RowLabels, segments: Segments) -> list[str]:
        """Return the problems of all spans (start, end, name) of a row together; there is at least one."""
        return []

    def truth(self, example: Example) -> Any:
        """Return the truth of an annotated row in the form of a prediction."""
        return example.labels[self.task.name]

    def label_names(self, example: Example) -> Sequence[str]:
        """Return the classes of an annotated row, or the name of each of its spans."""
        return ()

    def fitted(self, train: Sequence[Example]) -> Task:
        """Return the task with statistics of the training rows."""
        return self.task

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray | None:
        """Return the targets of rows in a small type, or None if they come from spans; `has_E` marks
        annotated rows."""
        return None

    def window_targets(self, spans: WindowSpans, annotated_W: BoolArray) -> AnyArray | None:
        """Return the targets of windows with these spans, or None."""
        return None

    def batch_target(self, split: TokenizedSplit, windows_B: IntArray, is_text_BL: BoolArray) -> AnyArray:
        """Return the target of some windows; `is_text_BL` excludes special tokens and padding."""
        return split.targets[self.task.name][windows_B].astype(self.target_type)

    # Its loss

    def initial_bias(self) -> list[float]:
        """Return the first bias of a head: the log-odds of rough priors. [num_outputs]

        One class of a multi_label task holds in a row; a token lies in a span of some name with probability
        1/4, in the evidence for a class that holds with 1/10; elsewhere 0. From 0 everywhere, the first steps
        only learn that positives are rare, with gradients so large that Adam's second moments hold back the
        next thousand steps (Lin et al. 2017, arXiv:1708.02002, section 4.1, for detection). On the 17
        overlapping slots of NLU++ two epochs give a span F1 of 0.69 instead of 0.
        """
        return [0.0] * self.num_outputs

    def labelled(self, target: Tensor) -> Tensor:
        """Return a mask of the items of a target, on the CPU, with any labelled class or name."""
        return target >= 0

    @abstractmethod
    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        """Return `hpo.training.losses.loss_sum` for logits in fp32; `options.loss` is one of `losses`."""

    def class_weights(self, targets: Iterable[Tensor]) -> Tensor | None:
        """Return the weights of `class_weighting: balanced` from the train split's targets, on the CPU.

        The batching does not matter. An absent class has weight 1. None: the kind has no classes.
        """
        return None

    # Its predictions

    @abstractmethod
    def decode(
        self, logits: FloatArray, split: TokenizedSplit, decision: DecodingThresholds, labels: Predicted
    ) -> list[Any]:
        """Return one prediction per example: a class, a list of classes, a number in raw units, or a sorted
        list of spans. `labels` are the predictions of the task in `evidence_for`, if any."""

    def choose(
        self, logits: FloatArray, split: TokenizedSplit, rows: list[int], metric: str, labels: Predicted
    ) -> DecodingThresholds:
        """Return the thresholds that maximise a metric on the annotated `rows`; there is at least one."""
        return DecodingThresholds()

    def probabilities(self, logits: FloatArray, split: TokenizedSplit) -> NDArray[np.float64] | None:
        """Return each example's probability of each class: [E, C]. None: the kind has no classes."""
        return None

    # Its scores

    @abstractmethod
    def row_values(self, predicted: Sequence[Any], examples: Sequence[Example]) -> RowValues:
        """Return each annotated row's part of the sums for metrics.

        The first mapping has `hits`, `true` and `predicted` by class or span name, sparse [N, C], if the kind
        has any; the second has all other values by name, [N].
        """

    @abstractmethod
    def scores(self, rows_B: FloatArray, counts_BC: ByName, sums_B: ByName, whole: Counts) -> Scores:
        """Return the metrics of sums over `rows_B` rows, NaN or infinite if undefined. `whole` has the counts
        of the whole split by class."""

    def whole_scores(self, num_rows: int, counts_NC: Mapping[str, Any], values_N: ByName) -> dict[str, float]:
        """Return the defined metrics of all rows."""
        whole = {name: np.asarray(rows.sum(axis=0)) for name, rows in counts_NC.items()}
        sums = {name: rows.sum(keepdims=True) for name, rows in values_N.items()}
        counts = {name: count_C[None] for name, count_C in whole.items()}
        values = self.scores(np.array([float(num_rows)]), counts, sums, tuple(whole.values()))
        return {name: float(value_B[0]) for name, value_B in values.items() if np.isfinite(value_B[0])}

    # Its verdicts

    def bounded(self, values_N: ByName) -> Mapping[str, FloatArray]:
        """Return the values of rows for verdicts, in which one row has a limited weight."""
        return dict(values_N)

    def row_bound(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> float | FloatArray:
        """Return the largest change of a metric by one row, times the number of rows; infinite if unknown.

        It is the same for all rows, or one for each, [N]. The values are those of `bounded`.
        """
        return 1.0 if metric in self.proportions else math.inf

    def constant_rows(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> RowValues | None:
        """Return the row values of the best constant prediction for a metric, given the row values of any
        predictions. None: the kind has no constant prediction."""
        return None

    # Its report

    def decided_by(self, decision: DecodingThresholds) -> str:
        """Return the thresholds in words, for the end of a clause."""
        return ""

    @abstractmethod
    def row_losses(self, predicted: Sequence[Any], examples: Sequence[Example], p_NC: Likely) -> FloatArray:
        """Return the size of each row's error, 0 for a right row: [N]. `p_NC` are the probabilities of
        classes, if any."""


KINDS = Registry[type[Kind]]("kind of task")

AnyKind = TypeVar("AnyKind", bound=type[Kind])


def register(kind: AnyKind) -> AnyKind:
    """Make a kind known by its name: a decorator, `hpo.kind` in the code of a study.

    Raises ValueError if another kind has the name, or `from_cell` has other arguments.
    """
    try:
        signature(kind.from_cell).bind("a", "|", has_decimal_comma=False)
    except TypeError:
        raise ValueError(
            f"the kind `{kind.name}` must have `from_cell(cls, cell, list_separator, *, has_decimal_comma)`."
        ) from None
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
    """Return True if less of a metric is better; `metric` is `<task>/<metric>` or the name alone."""
    name = metric.rpartition("/")[2]
    own = METRICS.get(name)
    return (own is not None and own.is_error) or any(name in kind.errors for kind in KINDS.values())


def class_name(value: Any) -> Any:
    """Return a class as text without outer white space, in Unicode's composed form (NFC).

    Whole numbers and booleans become text too; other values stay. A whole number may be a float: pandas makes
    floats of a column of whole numbers with an empty cell.
    """
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.strip())
    if isinstance(value, float | Decimal) and -(2**53) < value < 2**53 and value % 1 == 0:
        value = int(value)
    return str(value) if isinstance(value, int) else value


def not_classes(form: str, value: Any) -> ValueError:
    """Return the error for a value other than `form`, such as one class. It follows a label's location."""
    return ValueError(f" must be {form}, as text or a whole number, but got {shorten(repr(value), 60)}")


def indicators(task: Task, lists: Sequence[Sequence[str]]) -> NDArray[np.bool_]:
    """Return lists of labels as rows of booleans: [N, C]."""
    index = {label: c for c, label in enumerate(task.labels)}
    ones = [(n, index[label]) for n, names in enumerate(lists) for label in names]
    indicators_NC = np.zeros((len(lists), len(index)), bool)
    indicators_NC[tuple(np.array(ones, np.int64).reshape(-1, 2).T)] = True
    return indicators_NC


def is_multi_hot(classes: Collection[str], sizes: Collection[int]) -> bool:
    """Return True if lists with these classes and of these sizes are rows of 0 and 1, not of names."""
    return len(classes) == 2 and {*classes} <= BITS and len({*sizes} - {0}) == 1


NumberText = tuple[str, str, Mapping[str, float]]

_ASCII = str.maketrans("\u2212\u2013\ufe63\uff0d\uff0b\uff0e\uff0c\u066b\u066c\u2019", "----+.,.''")
_FORMS = {
    mark: re.compile(
        rf"(?i)(?![-+]?0\d+$)([-+]?(?:\d+|(?!0)\d{{1,3}}({group})\d{{3}}(?:\2\d{{3}})*|(?={mark}\d)))"
        rf"({mark}\d*)?(e[-+]?\d+)?"
    )
    for mark, group in ((r"\.", r"[,'\s]"), (",", r"[.'\s]"))
}


@lru_cache(maxsize=4096)
def readings(text: str, *, has_decimal_comma: bool) -> Mapping[str, float]:
    """Return the number by the mark of decimals, `.` or `,`, with the marks that fit; the usual one first."""
    plain = text.strip().translate(_ASCII)
    found: dict[str, float] = {}
    for mark, form in _FORMS.items():
        if match := form.fullmatch(plain):
            whole, _, decimals, exponent = match.groups("")
            found[mark[-1]] = float(re.sub(r"[^\d+-]", "", whole) + decimals.replace(",", ".") + exponent)
    is_point = not has_decimal_comma and ("." not in found or ("." in plain and "," not in plain))
    return {mark: value for mark, value in found.items() if mark == "." or not is_point}


def give_one_reading(task: str, numbers: Mapping[str, tuple[str, Mapping[str, float], Any]]) -> None:
    """Set the labels of rows to one reading of a column. Raises DataError.

    `numbers` have text, readings and labels; the first with one reading alone is under its mark.
    """
    wrong = f"labels.{task}: the mark of decimals must be the same in all numbers"
    sure = [mark for mark in ".," if mark in numbers]
    if len(sure) == 2:
        raise DataError(f"{wrong}, but {numbers['.'][0]} has `.` and {numbers[','][0]} has `,`.")
    for shown, found, labels in numbers.values():
        if not sure:
            two = f"{shown} is {found['.']:.15g} or {found[',']:.15g}"
            raise DataError(f"{wrong}, but {two}, and no number tells which. Write no mark of thousands.")
        labels[task] = found[sure[0]]
