"""The kind whose truth is a number of a row."""

from __future__ import annotations

from hpo.tasks.kind import Kind


class Regression(Kind):
    """A number in the units of the labels."""

    name = "regression"
    metrics = ("r2", "mae", "rmse")
    losses = ("mse", "huber")
    is_number = True
    label_unit_metrics = ("mae", "rmse")

    @property
    def num_outputs(self) -> int:
        return 1
