"""The tokens of a trial and the batches of its epochs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hpo.data.batches import training_batches
from hpo.data.source_sampling import SourceSampling
from hpo.tasks.tokenized_split import IntArray, TokenizedSplit
from hpo.training.budget import TrainState


@dataclass(frozen=True)
class TrainingData:
    train: TokenizedSplit
    validation: TokenizedSplit
    pad_id: int
    sampling: SourceSampling | None = None
    """Sampling from the sources of the data. None: each window once per epoch."""
    validation_rows: Mapping[str, int] = field(default_factory=dict)
    """{source: number of rows}, in the order of rows. Empty: one source."""

    def batches(self, batch_size: int, seed: int, epoch: int) -> list[IntArray]:
        return training_batches(self.train.lengths_W, batch_size, seed, epoch, self.sampling)

    def drawn_shares(self, batch_size: int, seed: int, state: TrainState) -> dict[str, dict[str, float]]:
        """Return each source's share of the windows of finished steps."""
        if self.sampling is None:
            return {}
        begun = self.batches(batch_size, seed, state.epoch)[: state.batch]
        windows = np.concatenate([np.array([], dtype=np.int64), *begun])
        return {"drawn_share": self.sampling.drawn_shares(state.epoch, windows)}
