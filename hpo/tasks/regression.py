"""The kind whose truth is a number of a row."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.errors import shorten
from hpo.tasks.kind import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.config.data_config import CsvConfig
    from hpo.data.examples import Example, Label
    from hpo.data.tasks import Task
    from hpo.data.tokenized_split import AnyArray, BoolArray
    from hpo.training.losses import LossOptions


class Regression(Kind):
    """A number in the units of the labels."""

    name = "regression"
    metrics = ("r2", "mae", "rmse")
    losses = ("mse", "huber")
    is_number = True
    target_type = "float32"
    label_unit_metrics = ("mae", "rmse")

    @property
    def num_outputs(self) -> int:
        return 1

    @classmethod
    def from_cell(cls, cell: Any, csv: CsvConfig) -> Any:
        if isinstance(cell, str):
            # Excel writes `;` between cells exactly where the comma is that of decimals.
            is_decimal_comma = csv.delimiter != "," and re.fullmatch(r"\s*[-+]?\d+,\d+\s*", cell)
            with suppress(ValueError):
                return float(cell.replace(",", ".") if is_decimal_comma else cell)
        return cell

    def label(self, value: Any) -> Label:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f" must be a finite number, but got {shorten(repr(value), 60)}")
        return float(value)

    def fitted(self, train: Sequence[Example]) -> Task:
        """With the mean and standard deviation of the training targets."""
        name = self.task.name
        values = np.array([row.labels[name] for row in train if name in row.labels], dtype=np.float64)
        return replace(self.task, target_mean=float(values.mean()), target_std=float(values.std()) or 1.0)

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray:
        values: list[Any] = [example.labels.get(self.task.name, np.nan) for example in examples]
        return np.array(values, dtype=np.float32)

    def labelled(self, target: Tensor) -> Tensor:
        return ~target.isnan()

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        from hpo.tasks.losses import regression_sum

        mean, std = self.task.target_mean, self.task.target_std
        return regression_sum(logits.squeeze(-1), target, options.loss, mean, std)
