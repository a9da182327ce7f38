"""Scores of a deployable form on a split.

The tokens, the decoding and the thresholds are those of an evaluation. The batches are those of
`TrainedModel.predict`, with one exception. Dynamic int8 takes the ranges of activations from each batch, so
the logits of a text depend on the other texts of its batch. Such a form is scored one window at a time, as
when single texts are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hpo.evaluation.detailed import predict_split
from hpo.inference.model import TrainedModel
from hpo.inference.onnx_network import OnnxNetwork
from hpo.tasks.tokenized_split import TokenizedSplit
from hpo.training.metrics import RowStatistics


def split_statistics(
    model: TrainedModel, split: TokenizedSplit, on_batch: Callable[[], None] = lambda: None
) -> Mapping[str, RowStatistics] | None:
    """The statistics of each task, from which metrics and intervals are made; None if a logit is not finite.

    `on_batch` runs before each batch.
    """
    max_tokens = 1 if depends_on_batch(model) else None
    logits = model.logits(split, max_tokens=max_tokens, on_batch=on_batch)
    if not all(np.isfinite(values).all() for values in logits.values()):
        return None
    return predict_split(model.tasks, logits, split, model.decisions).statistics


def depends_on_batch(model: TrainedModel) -> bool:
    """True if the other texts of its batch change the logits of a text by more than rounding."""
    return isinstance(model.network, OnnxNetwork) and model.network.has_ranges_of_batch
