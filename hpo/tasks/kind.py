"""What a kind of task is: one class, which everything asks that depends on the kind of a task.

Six kinds are here, each in a file that it may share with its next of kin; `hpo.tasks.registry` knows them by
name. The layout of their logits and targets:

    kind                  logits        target                      missing  an item is
    single_label          [B, C]        int64 [B]                   -100     a row
    multi_label           [B, C]        float32 [B, C] in {0, 1}    -1       a row
    regression            [B, 1]        float32 [B], raw units      NaN      a row
    token_classification  [B, L, 2N+1]  int64 [B, L]                -100     a token
      spans may overlap   [B, L, 3N]    int64 [B, L, N]             -100     a token
    span_extraction       [B, L, 2]     int64 [B, 2], inclusive     -100     a row
    span_per_label        [B, L, C]     float32 [B, L, C] in {0, 1} -1       a token and class
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.config.data_config import CsvConfig, TaskConfig
    from hpo.data.examples import Example, Label
    from hpo.data.tasks import Task
    from hpo.data.tokenized_split import AnyArray, BoolArray, IntArray, TokenizedSplit, WindowSpans
    from hpo.training.losses import LossOptions

    RowSpans = Sequence[tuple[int, int, str]]
    RowLabels = Mapping[str, Label]
    Segments = Mapping[str, tuple[int, int]]

IGNORE_INDEX = -100

Span = tuple[str, int, int]
"""Name, start and end of a span in characters, end exclusive."""


class Kind(ABC):
    """A kind, as it is for one task. PyTorch is imported by the methods that take tensors: a study is read
    without it."""

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
    min_labels: ClassVar[int] = 0
    """Fewest classes or span names of a task."""
    needed_key: ClassVar[str | None] = None
    """Key that a task's configuration must have."""
    at_first_token: ClassVar[str | None] = None
    """What it marks at the first token of a window, which must be a special one."""
    target_type: ClassVar[str] = "int64"
    """NumPy's name of the type of a batch's targets."""
    label_unit_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics in the units of the labels."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @classmethod
    def problems(cls, config: TaskConfig) -> Iterator[tuple[str, str]]:
        """What is wrong with the configuration of a task: keys, and what must hold."""
        if cls.needed_key is not None and getattr(config, cls.needed_key) is None:
            yield cls.needed_key, f"must be given for the kind {cls.name}."

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Size of the logits' last dimension."""

    # Its truth

    @classmethod
    def from_cell(cls, cell: Any, csv: CsvConfig) -> Any:
        """The label in a table's cell that is not empty, in the form that it has in a jsonl line.

        Raises JSONDecodeError where it must be JSON and is not.
        """
        return cell

    def label(self, value: Any) -> Label:
        """A row's label as an example holds it. Raises ValueError with what follows its place in the message
        where it is none."""
        return value  # type: ignore[no-any-return]

    def span_problems(self, spans: RowSpans, labels: RowLabels, segments: Segments) -> list[str]:
        """What is wrong with the spans (start, end, name) of a row, which has some, and can be seen of all of
        them alone, or of its labels and segments."""
        return []

    def held(self, example: Example) -> Sequence[str]:
        """The classes of an annotated row, or the name of each of its spans; none of a number."""
        return ()

    def fitted(self, train: Sequence[Example]) -> Task:
        """The task with what it must know of the training rows."""
        return self.task

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray | None:
        """The targets of rows, the same in all their windows, in a small type; None where `window_targets` or
        `batch_target` makes them of spans. `has_E` says which rows are annotated."""
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
        """The sum of the loss over the labelled items; `options.loss` is one of `losses`.

        For the rest see `hpo.training.losses.loss_sum`; logits are in fp32.
        """

    def class_weights(self, targets: Iterable[Tensor]) -> Tensor | None:
        """The weights of `class_weighting: balanced` from the train split's targets, on the CPU and of any
        batching; a class that does not occur gets 1. None: the kind has no classes.
        """
        return None


def indicators(task: Task, held: Sequence[Sequence[str]]) -> NDArray[np.bool_]:
    """Lists of labels as rows of booleans: [N, C]."""
    index = {label: c for c, label in enumerate(task.labels)}
    ones = [(n, index[label]) for n, of_row in enumerate(held) for label in of_row]
    indicators_NC = np.zeros((len(held), len(index)), bool)
    indicators_NC[tuple(np.array(ones, np.int64).reshape(-1, 2).T)] = True
    return indicators_NC
