"""The kinds whose truth is classes of a row: one of them, or any number."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.errors import did_you_mean, shorten
from hpo.tasks.kind import IGNORE_INDEX, Kind, indicators

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.config.data_config import CsvConfig
    from hpo.data.examples import Example, Label
    from hpo.data.tokenized_split import AnyArray, BoolArray
    from hpo.training.losses import LossOptions


class _Labels(Kind):
    has_classes = True

    @property
    def num_outputs(self) -> int:
        return len(self.task.labels)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {label: c for c, label in enumerate(self.task.labels)}

    def _listed(self, label: Any) -> list[str]:
        return label if self.is_list else [label]

    def label(self, value: Any) -> Label:
        """Its classes are the strings of the task: a million rows hold them once."""
        classes = self._listed(value)
        if not isinstance(classes, list) or not all(isinstance(item, str) for item in classes):
            form = "a list of classes" if self.is_list else "one class as a string"
            raise ValueError(f" must be {form}, but got {shorten(repr(value), 60)}")
        unknown = [item for item in classes if item not in self._index]
        if unknown:
            raise ValueError(f": unknown class `{unknown[0]}`.{did_you_mean(unknown[0], self.task.labels)}")
        if len(set(classes)) < len(classes):
            raise ValueError(f" names a class twice: {shorten(repr(value), 60)}")
        own = [self.task.labels[self._index[item]] for item in classes]
        return own if self.is_list else own[0]

    def held(self, example: Example) -> Sequence[str]:
        return self._listed(example.labels[self.task.name])


class SingleLabel(_Labels):
    """One class of a row."""

    name = "single_label"
    metrics = ("f1_macro", "f1_micro", "accuracy")
    losses = ("cross_entropy", "focal")
    min_labels = 2

    @classmethod
    def from_cell(cls, cell: Any, csv: CsvConfig) -> Any:
        return str(cell) if isinstance(cell, int) else cell

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray:
        labels: list[Any] = [example.labels.get(self.task.name) for example in examples]
        classes = (self._index.get(label, IGNORE_INDEX) for label in labels)
        return np.fromiter(classes, dtype=np.int32, count=len(examples))

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        from hpo.tasks.losses import multiclass_sum

        return multiclass_sum(logits, target, options.gamma, options.label_smoothing, weight)

    def class_weights(self, targets: Iterable[Tensor]) -> Tensor:
        from hpo.tasks.losses import multiclass_weights

        return multiclass_weights(targets, self.num_outputs)


class MultiLabel(_Labels):
    """Any number of classes of a row, none included."""

    name = "multi_label"
    metrics = ("f1_macro", "f1_micro", "exact_match")
    losses = ("bce", "focal")
    is_list = True
    min_labels = 1
    target_type = "float32"

    @classmethod
    def from_cell(cls, cell: Any, csv: CsvConfig) -> Any:
        if not isinstance(cell, str):
            return cell
        if cell.lstrip().startswith("["):
            return json.loads(cell)
        return [part for piece in cell.split(csv.list_separator or "|") if (part := piece.strip())]

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray:
        labels: list[Any] = [example.labels.get(self.task.name, ()) for example in examples]
        held_EC = indicators(self.task, labels).astype(np.int8)
        return np.where(has_E[:, None], held_EC, np.int8(-1))

    def initial_bias(self) -> list[float]:
        return [-math.log(max(self.num_outputs - 1, 1))] * self.num_outputs

    def labelled(self, target: Tensor) -> Tensor:
        return (target >= 0).any(dim=-1)

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        from hpo.tasks.losses import binary_sum

        return binary_sum(logits, target, options.gamma, options.label_smoothing, weight)

    def class_weights(self, targets: Iterable[Tensor]) -> Tensor:
        from hpo.tasks.losses import binary_weights

        return binary_weights(targets, self.num_outputs)
