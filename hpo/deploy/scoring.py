"""What an artifact answers on a split, how good it is, and how far from its own fp32.

The answers are those of an evaluation: the same tokens, decoding and thresholds. Batches are those of
`TrainedModel.predict`, but for int8 with ranges of each batch (dynamic): there a text's logits depend on what
stands beside it, padding included, so it is scored one window at a time, as when single texts are predicted.
How far other batches move it is measured beside.

What is lost is the difference of the scores of two artifacts on the same rows, whose interval comes from
resampling these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpo.data.tasks import Task
from hpo.data.tokenized_split import TokenizedSplit
from hpo.evaluation.detailed import SplitPredictions, predict_split
from hpo.inference.model import TrainedModel
from hpo.inference.onnx_network import OnnxNetwork
from hpo.tasks.registry import kind_of
from hpo.training.metrics import RowStatistics


@dataclass(frozen=True)
class Answers:
    """What a model says of a split."""

    split: TokenizedSplit
    logits: Mapping[str, NDArray[np.float32]]
    predicted: SplitPredictions

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Those of the model."""
        return self.predicted.tasks

    @property
    def statistics(self) -> Mapping[str, RowStatistics]:
        """By task: what metrics and intervals are made of."""
        return self.predicted.statistics


def answers(
    model: TrainedModel,
    split: TokenizedSplit,
    *,
    in_batches: bool = False,
    on_batch: Callable[[], None] = lambda: None,
) -> Answers | None:
    """The answers of a model; None where a logit is not finite.

    `in_batches`: those of `predict` also where they change the logits. `on_batch` runs before each batch.
    """
    alone = depends_on_batch(model) and not in_batches
    logits = model.logits(split, max_tokens=1 if alone else None, on_batch=on_batch)
    if not all(np.isfinite(values).all() for values in logits.values()):
        return None
    return Answers(split, logits, predict_split(model.tasks, logits, split, model.decisions))


def depends_on_batch(model: TrainedModel) -> bool:
    """Whether a text's logits depend on the other texts of its batch, by more than rounding."""
    return isinstance(model.network, OnnxNetwork) and model.network.has_ranges_of_batch


def largest_change(answered: Answers, reference: Answers) -> float | None:
    """Of any probability of a class or tag; None where no task has probabilities."""
    changes = []
    for task in answered.tasks:
        ours, theirs = (_probabilities(task, of) for of in (answered, reference))
        if ours is not None and theirs is not None:
            changes.append(float(np.abs(ours - theirs).max(initial=0.0)))
    return max(changes, default=None)


def _probabilities(task: Task, answered: Answers) -> NDArray[np.float64] | None:
    """Of classes, [E, C]; of the kinds that find spans, of the tags of each token of a text."""
    if task.level == "sequence":
        return answered.predicted.probabilities.get(task.name)
    split = answered.split
    return kind_of(task).token_probabilities(
        answered.logits[task.name][split.owned_T & (split.char_start_T >= 0)]
    )
