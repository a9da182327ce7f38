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
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from hpo.config.data_config import TaskConfig
    from hpo.data.tasks import Task

IGNORE_INDEX = -100


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
