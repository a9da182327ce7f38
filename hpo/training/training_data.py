"""The tokens that a trial trains on and is evaluated on, and the batches of its epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hpo.data.batches import training_batches
from hpo.data.source_sampling import SourceSampling
from hpo.tasks.tokenized_split import IntArray, TokenizedSplit
from hpo.training.progress import TrainState


@dataclass(frozen=True)
class TrainingData:
    """The tokens of a trial."""

    train: TokenizedSplit
    validation: TokenizedSplit
    pad_id: int
    sampling: SourceSampling | None = None
    """How training draws from the sources of the data. None: each window once in an epoch."""
    validation_rows: Mapping[str, int] = field(default_factory=dict)
    """The rows of each source, in their order; empty: the data set is one."""

    def batches(self, batch_size: int, seed: int, epoch: int) -> list[IntArray]:
        """The windows of each training batch of an epoch."""
        return training_batches(self.train.lengths_W, batch_size, seed, epoch, self.sampling)

    def drawn_shares(self, batch_size: int, seed: int, state: TrainState) -> dict[str, dict[str, float]]:
        """What a trial records of its sources: the share of each in the windows that were trained on."""
        if self.sampling is None:
            return {}
        begun = self.batches(batch_size, seed, state.epoch)[: state.batch]
        windows = np.concatenate([np.array([], dtype=np.int64), *begun])
        return {"drawn_share": self.sampling.drawn_shares(state.epoch, windows)}
