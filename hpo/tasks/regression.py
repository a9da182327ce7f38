"""The kind with a number of a row.

Targets stay in float64 until they are standardised: the float32 nearest to a timestamp is off by up to 64 s.
Metrics sum squares in float64, so a target and the spread of the targets need a square there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpo.errors import DataError, shorten
from hpo.tasks.example import Example, Label
from hpo.tasks.kind import (
    ByName,
    Counts,
    FloatArray,
    Kind,
    Likely,
    Predicted,
    RowValues,
    Scores,
    Task,
    readings,
)
from hpo.tasks.options import DecodingThresholds, LossOptions
from hpo.tasks.sums import mean_of_windows
from hpo.tasks.tokenized_split import AnyArray, BoolArray, TokenizedSplit

_LARGEST = 1e150
"""The largest magnitude of a target; its inverse is the smallest spread."""
_ROUNDING = 1e-12
"""Largest ratio of variance to sum of squares for equal values, due to rounding."""


class Regression(Kind):
    """A number in the units of the labels."""

    name = "regression"
    metrics = ("r2", "mae", "rmse")
    losses = ("mse", "huber")
    is_number = True
    target_type = "float64"
    errors = ("mae", "rmse")

    @property
    def num_outputs(self) -> int:
        return 1

    @classmethod
    def from_cell(cls, cell: Any, list_separator: str, *, has_decimal_comma: bool) -> Any:
        if isinstance(cell, str):
            return next(iter(readings(cell, has_decimal_comma=has_decimal_comma).values()), cell)
        return float(cell) if isinstance(cell, Decimal) else cell

    def label(self, value: Any) -> Label:
        if type(value) not in (int, float) or not abs(value) < math.inf:
            got = f"{shorten(repr(value), 60)}. Write plain digits, as -1234.5"
            raise ValueError(f" must be a finite number, but got {got}. Leave it empty if it is unknown")
        if abs(value) > _LARGEST:
            got = shorten(repr(value), 60)
            raise ValueError(f" must be at most {_LARGEST:g} in magnitude, but got {got}. Scale it")
        return float(value)

    def fitted(self, train: Sequence[Example]) -> Task:
        """Return the task with mean and standard deviation of the training targets; 1 for equal targets."""
        name = self.task.name
        values = np.array([row.labels[name] for row in train if name in row.labels], dtype=np.float64)
        if values.min() == values.max():
            return replace(self.task, target_mean=float(values[0]), target_std=1.0)
        if (std := float(values.std())) < 1 / _LARGEST:
            raise DataError(
                f"task `{name}` must have a standard deviation of at least {1 / _LARGEST:g} in training, but "
                f"got {std:g}. Scale its numbers."
            )
        return replace(self.task, target_mean=float(values.mean()), target_std=std)

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray:
        values: list[Any] = [example.labels.get(self.task.name, np.nan) for example in examples]
        return np.array(values, dtype=np.float64)

    def labelled(self, target: Tensor) -> Tensor:
        return ~target.isnan()

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        """Return the squared error, or the Huber loss with delta 1, in units of the train split's standard
        deviation."""
        labelled_B = self.labelled(target)
        mean, std = self.task.target_mean, self.task.target_std or 1.0
        target_B = ((torch.where(labelled_B, target, mean).double() - mean) / std).float()
        output_B = torch.where(labelled_B, logits.squeeze(-1), 0.0)
        function = F.huber_loss if options.loss == "huber" else F.mse_loss
        return torch.where(labelled_B, function(output_B, target_B, reduction="none"), 0.0).sum()

    def decode(
        self, logits: FloatArray, split: TokenizedSplit, decision: DecodingThresholds, labels: Predicted
    ) -> list[Any]:
        output_E = mean_of_windows(logits, split)[:, 0]
        mean, std = self.task.target_mean, self.task.target_std or 1.0
        return [float(y) for y in output_E * std + mean]

    def row_values(self, predicted: Sequence[Any], examples: Sequence[Example]) -> RowValues:
        """Centre the targets, so rounding in the sum of squares does not hide their variance."""
        truth_N = np.array([example.labels[self.task.name] for example in examples], np.float64)
        predicted_N = np.array(predicted, np.float64)
        # The square of a larger prediction is infinite: the metric is undefined.
        error_N = np.where(np.abs(predicted_N) < _LARGEST, predicted_N, np.nan) - truth_N
        target_N = truth_N - (truth_N.mean() if len(truth_N) else 0.0)
        values = {
            "absolute": np.abs(error_N),
            "squared": error_N**2,
            "target": target_N,
            "target_squared": target_N**2,
        }
        return {}, values

    def scores(self, rows_B: FloatArray, counts_BC: ByName, sums_B: ByName, whole: Counts) -> Scores:
        rows_B = np.maximum(rows_B, 1)
        residual_B, squares_B = sums_B["squared"], sums_B["target_squared"]
        total_B = squares_B - sums_B["target"] ** 2 / rows_B
        is_constant_B = total_B <= _ROUNDING * squares_B
        ratio_B = residual_B / np.where(is_constant_B, 1, total_B)
        constant_B = np.where(np.isfinite(residual_B), residual_B == 0, np.nan)
        return {
            "mae": sums_B["absolute"] / rows_B,
            "rmse": np.sqrt(residual_B / rows_B),
            "r2": np.where(rows_B > 1, np.where(is_constant_B, constant_B, 1 - ratio_B), np.nan),
        }

    def bounded(self, values_N: ByName) -> Mapping[str, FloatArray]:
        """Clip errors to the range of the labels."""
        most = _range(values_N["target"])
        absolute_N, squared_N = values_N["absolute"], values_N["squared"]
        caps = {"absolute": np.minimum(absolute_N, most), "squared": np.minimum(squared_N, most**2)}
        return {**values_N, **caps}

    def row_bound(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> float:
        """Use that an error lies between 0 and the range of the labels."""
        target_N = values_N["target"]
        num_rows, most = len(target_N), _range(target_N)
        if not most:
            return math.inf
        if metric == "mae":
            return most
        if metric == "rmse":
            sum_squared = float(values_N["squared"].sum())
            return math.sqrt(num_rows) * (math.sqrt(sum_squared + most**2) - math.sqrt(sum_squared))
        return most**2 / float(target_N.var()) if metric == "r2" else math.inf

    def constant_rows(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> RowValues | None:
        """Predict the median of the labels for `mae`, else their mean."""
        target_N = values_N["target"]
        error_N = target_N - (np.median(target_N) if metric == "mae" else target_N.mean())
        return {}, {**values_N, "absolute": np.abs(error_N), "squared": error_N**2}

    def row_losses(self, predicted: Sequence[Any], examples: Sequence[Example], p_NC: Likely) -> FloatArray:
        truth: list[Any] = [example.labels[self.task.name] for example in examples]
        return np.abs(np.array(predicted, np.float64) - np.array(truth, np.float64))


def _range(values_N: FloatArray) -> float:
    return float(np.ptp(values_N)) if len(values_N) else 0.0
