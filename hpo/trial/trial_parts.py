"""What a trial is made of before its first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpo.config.trial_config import TrialConfig
from hpo.data.batches import Batch, collate
from hpo.data.tokenized_split import TokenizedSplit
from hpo.models.multitask import MultitaskModel
from hpo.precision.table import Resolution
from hpo.training.losses import MultitaskLoss


@dataclass(frozen=True)
class TrialParts:
    """A trial's settings, its model in fp32 weights on the device, its loss and its data."""

    config: TrialConfig
    resolution: Resolution
    model: MultitaskModel
    loss_fn: MultitaskLoss
    train_split: TokenizedSplit
    validation_split: TokenizedSplit
    pad_id: int
    compile: Callable[[MultitaskModel], object] | None
    """Compiles a model in place; None: the trial is not compiled."""

    def batch(self, first: int, last: int = 0) -> Batch:
        """The `first` shortest and the `last` longest windows of the training split, on the CPU.

        Of a split with fewer windows, all of them.
        """
        order = np.argsort(self.train_split.lengths_W)
        windows = np.concatenate([order[:first], order[::-1][:last]])
        return collate(self.train_split, windows, self.loss_fn.tasks, self.pad_id)
