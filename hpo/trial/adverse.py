"""What the compatibility check runs on: legal inputs that are the hardest on a reduced precision.

Texts of very different lengths make a batch that is mostly padding, where rows of attention that are masked
whole gave NaN (transformers 31035); a text of one token leaves softmax and pooling a single term. Class
weights stretch the gradients, so those of a trial that balances its classes are also tried at their bounds.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from hpo.data.batches import Batch, collate
from hpo.data.tasks import IGNORE_INDEX, Task
from hpo.training.losses import MAX_CLASS_WEIGHT, MIN_CLASS_WEIGHT, MultitaskLoss
from hpo.trial.trial_parts import TrialParts

SHORT = 8
"""A text is cut to this part of the longest."""


def adverse_batch(parts: TrialParts) -> Batch:
    """The longest window of the training split, the shortest (at most an eighth of that), and one token."""
    order = np.argsort(parts.train_split.lengths_W)
    tasks = parts.loss_fn.tasks
    batch = collate(parts.train_split, [order[-1], order[0], order[0]], tasks, parts.pad_id)
    longest, shortest = int(batch.lengths_B[0]), int(batch.lengths_B[1])
    lengths_B = np.array([longest, max(1, min(shortest, longest // SHORT)), 1])
    kept_BL = torch.arange(batch.input_ids_BL.shape[1]) < torch.as_tensor(lengths_B)[:, None]
    targets = {task.name: _cut(task, batch.targets[task.name], kept_BL) for task in tasks}
    return dataclasses.replace(
        batch,
        input_ids_BL=torch.where(kept_BL, batch.input_ids_BL, parts.pad_id),
        attention_mask_BL=kept_BL.to(batch.attention_mask_BL.dtype),
        type_ids_BL=None if batch.type_ids_BL is None else torch.where(kept_BL, batch.type_ids_BL, 0),
        targets=targets,
        lengths_B=lengths_B,
    )


def _cut(task: Task, target: Tensor, kept_BL: Tensor) -> Tensor:
    """The target without what lies behind a text's end."""
    if task.level == "sequence":
        return target
    if task.kind == "span_extraction":  # the first and the last token of the answer
        lengths_B1 = kept_BL.sum(dim=1, keepdim=True)
        is_inside_B1 = (target < lengths_B1).all(dim=1, keepdim=True)
        return torch.where(is_inside_B1, target, IGNORE_INDEX)
    kept = kept_BL.reshape(*kept_BL.shape, *[1] * (target.dim() - 2))
    missing = -1.0 if target.is_floating_point() else IGNORE_INDEX
    return torch.where(kept, target, missing)


def with_extreme_class_weights(loss_fn: MultitaskLoss) -> MultitaskLoss | None:
    """The loss with every class weight at one of its bounds, by turns; None where it has none."""
    weights = {name: own for name, own in loss_fn.class_weight.items() if own is not None}
    if not weights:
        return None
    extreme = {
        name: torch.where(
            torch.arange(len(own), device=own.device) % 2 == 0, MAX_CLASS_WEIGHT, MIN_CLASS_WEIGHT
        )
        for name, own in weights.items()
    }
    return dataclasses.replace(loss_fn, class_weight=extreme)
