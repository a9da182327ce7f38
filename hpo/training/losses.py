"""The loss of each kind of task, and of a batch with all of them.

Every loss is a sum over the labelled items, in fp32 whatever the precision of the logits. The caller
divides by the number of items of the whole batch (`count_items`, on the CPU, before the forward), so
splitting a batch into micro-batches cannot change the loss, also where labels are missing.

An item's loss is the negative log-likelihood of all that is known of it, for a multi_label row the sum
over its classes. With a mean over classes instead, a task of 62 classes pulls on the shared encoder with
a 62nd of the strength of a single_label task beside it, and hardly learns before that one has settled.

Nothing here looks at a tensor's values from Python, so a step needs no device sync and can be captured in a
CUDA graph. Missing items are masked before the arithmetic and not only after it: a NaN target behind
`torch.where` would still give a NaN gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpo.data.batches import Batch
from hpo.data.tasks import Task, tags_each_name
from hpo.errors import InputError
from hpo.tasks.kind import IGNORE_INDEX
from hpo.tasks.registry import KINDS

# Balanced weights stay within these bounds: a class seen 9 times in 2000 rows would otherwise weigh 220
# times its negatives, and one mislabelled row would steer the whole head.
MIN_CLASS_WEIGHT = 0.1
MAX_CLASS_WEIGHT = 10.0


@dataclass(frozen=True)
class LossOptions:
    """A trial's loss settings, shared by its tasks.

    `label_smoothing` in [0, 1) moves that share of a target to the uniform distribution over classes
    (over positions in span_extraction, over {0, 1} for binary targets); regression has none.
    `focal_gamma` >= 0 matters to the loss `focal` alone; 0 makes it cross-entropy.
    """

    loss: str = "auto"
    label_smoothing: float = 0.0
    focal_gamma: float = 2.0


def check_loss(tasks: Iterable[Task], loss: str) -> None:
    """Raise InputError unless `loss` fits a task.

    A task of a kind that the study's `loss` does not fit keeps the loss of `auto`; a loss that would
    change no task is a mistake.
    """
    kinds = sorted({task.kind for task in tasks})
    fits = [name for name, kind in KINDS.items() if loss in kind.losses]
    if loss != "auto" and not set(kinds) & set(fits):
        raise InputError(
            f"loss: `{loss}` fits the kinds {', '.join(fits)}, "
            f"but the tasks are of the kinds {', '.join(kinds)}. Use auto."
        )


def count_items(task: Task, target: Tensor) -> int:
    """Return the number of labelled items of a target, as the table of `hpo.tasks.kind` counts them.

    An item is labelled if any of its classes or names is. Call it with the target on the CPU: on a GPU it
    would wait for the device.
    """
    labelled = ~torch.isnan(target) if task.kind == "regression" else target >= 0
    if task.kind in ("multi_label", "span_extraction") or tags_each_name(task):
        labelled = labelled.any(dim=-1)
    return int(labelled.sum())


def loss_sum(
    task: Task,
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    class_weight: Tensor | None,
    attention_mask_BL: Tensor,
) -> Tensor:
    """Return the fp32 sum of the task's loss over the labelled items.

    For shapes see `hpo.tasks.kind`. `class_weight` comes from `class_weights` and lies on the device
    of the logits. `attention_mask_BL` (nonzero at real tokens) keeps padding out of span_extraction's
    softmax over positions; the other kinds mark padding in their targets. A batch without items gives 0
    with a gradient of 0.
    """
    logits = logits.float()
    loss = options.loss if options.loss in KINDS[task.kind].losses else KINDS[task.kind].losses[0]
    gamma = options.focal_gamma if loss == "focal" else 0.0
    if task.kind == "regression":
        return _regression_sum(task, logits.squeeze(-1), target, loss)
    if task.kind == "span_extraction":
        return _position_sum(logits, target, attention_mask_BL != 0, options.label_smoothing)
    if task.kind in ("multi_label", "span_per_label"):
        return _binary_sum(logits, target, gamma, options.label_smoothing, class_weight)
    num_classes = 3 if tags_each_name(task) else task.num_outputs
    logits_NK = logits.reshape(-1, num_classes)
    return _multiclass_sum(logits_NK, target.reshape(-1), gamma, options.label_smoothing, class_weight)


def _multiclass_sum(
    logits_NK: Tensor, target_N: Tensor, gamma: float, label_smoothing: float, weight_K: Tensor | None
) -> Tensor:
    """Cross-entropy, or the focal loss of Lin et al. 2017 (arXiv:1708.02002), eq. 5.

    With q the target smoothed as in `F.cross_entropy` and w the class weights, an item's loss is
    sum_c w_c q_c (1 - p_c)^gamma (-log p_c): for gamma = 0 exactly `F.cross_entropy`, for a one-hot q
    the focal loss.
    """
    if gamma == 0.0:
        # Its `ignore_index` is IGNORE_INDEX unless told otherwise.
        return F.cross_entropy(
            logits_NK, target_N, weight_K, reduction="sum", label_smoothing=label_smoothing
        )
    labelled_N = target_N != IGNORE_INDEX
    log_p_NK = F.log_softmax(torch.where(labelled_N[:, None], logits_NK, 0.0), dim=-1)
    # The clamp keeps log(1 - p) and its gradient finite where p rounds to 1.
    p_NK = log_p_NK.exp().clamp(max=1 - torch.finfo(torch.float32).eps)
    loss_NK = -log_p_NK * torch.exp(gamma * torch.log1p(-p_NK))
    if weight_K is not None:
        loss_NK = loss_NK * weight_K
    loss_N = loss_NK.gather(1, target_N.clamp(min=0)[:, None]).squeeze(1)
    if label_smoothing:
        loss_N = (1 - label_smoothing) * loss_N + label_smoothing * loss_NK.mean(dim=-1)
    return torch.where(labelled_N, loss_N, 0.0).sum()


def _binary_sum(
    logits: Tensor, target: Tensor, gamma: float, label_smoothing: float, positive_weight_C: Tensor | None
) -> Tensor:
    """Binary cross-entropy, or the binary focal loss (arXiv:1708.02002, eq. 4), for each class by itself."""
    labelled = target >= 0
    logits = torch.where(labelled, logits, 0.0)
    y = torch.where(labelled, target, 0.0) * (1 - label_smoothing) + label_smoothing / 2
    log_p, log_not_p = F.logsigmoid(logits), F.logsigmoid(-logits)
    positive, negative = -log_p, -log_not_p
    if gamma != 0.0:
        # (1 - p)^gamma by way of the logarithm: its gradient is finite at p = 1 for every gamma > 0.
        positive, negative = positive * torch.exp(gamma * log_not_p), negative * torch.exp(gamma * log_p)
    if positive_weight_C is not None:
        positive = positive * positive_weight_C
    return torch.where(labelled, y * positive + (1 - y) * negative, 0.0).sum()


def _position_sum(logits_BL2: Tensor, target_B2: Tensor, real_BL: Tensor, label_smoothing: float) -> Tensor:
    """Mean of the start's and the end's cross-entropy over the real positions, summed over rows."""
    real_BL1 = real_BL[:, :, None]
    masked_BL2 = torch.where(real_BL1, logits_BL2, torch.finfo(torch.float32).min)
    log_p_BL2 = F.log_softmax(masked_BL2, dim=1)
    loss_B2 = -log_p_BL2.gather(1, target_B2.clamp(min=0)[:, None, :]).squeeze(1)
    if label_smoothing:
        uniform_B2 = -torch.where(real_BL1, log_p_BL2, 0.0).sum(dim=1) / real_BL1.sum(dim=1)
        loss_B2 = (1 - label_smoothing) * loss_B2 + label_smoothing * uniform_B2
    return torch.where(target_B2 != IGNORE_INDEX, loss_B2, 0.0).sum() / 2


def _regression_sum(task: Task, output_B: Tensor, target_B: Tensor, loss: str) -> Tensor:
    """Squared error, or the Huber loss with delta 1, in units of the train split's standard deviation."""
    labelled_B = ~torch.isnan(target_B)
    target_B = (torch.where(labelled_B, target_B, 0.0) - task.target_mean) / (task.target_std or 1.0)
    output_B = torch.where(labelled_B, output_B, 0.0)
    function = F.huber_loss if loss == "huber" else F.mse_loss
    return torch.where(labelled_B, function(output_B, target_B, reduction="none"), 0.0).sum()


def class_weights(task: Task, targets: Iterable[Tensor]) -> Tensor | None:
    """Return the weights of `class_weighting: balanced` from the train split's targets, or None.

    `targets` are CPU targets of any batching. Multi-class kinds: scikit-learn's `balanced`,
    n / (k * count), with k the number of classes that occur, float32 [K] ([3] for O, B and I over all
    names when spans may overlap). Binary kinds: negatives / positives of each class, float32 [C], the
    weight of a positive. All are clipped to [0.1, 10]; a class that does not occur gets 1. None for
    regression and span_extraction, which have no classes.
    """
    if task.kind in ("regression", "span_extraction"):
        return None
    if task.kind in ("multi_label", "span_per_label"):
        rows = (target.reshape(-1, len(task.labels)) for target in targets)
        per_batch = [torch.stack([(target_NC == value).sum(dim=0) for value in (0, 1)]) for target_NC in rows]
        negatives, counts = torch.stack(per_batch).sum(dim=0)
        weights = negatives / counts.clamp(min=1)
    else:
        size = 3 if tags_each_name(task) else task.num_outputs
        per_batch = [torch.bincount(target[target != IGNORE_INDEX], minlength=size) for target in targets]
        counts = torch.stack(per_batch).sum(dim=0)
        weights = counts.sum() / ((counts > 0).sum() * counts).clamp(min=1)
    return torch.where(counts > 0, weights.clamp(MIN_CLASS_WEIGHT, MAX_CLASS_WEIGHT), 1.0)


@dataclass(eq=False)
class MultitaskLoss:
    """The loss of a batch: each task's mean over its labelled items, weighted and summed, in fp32.

    With `log_variance` (one learnt s for each task) a task's loss L enters as exp(-s) L + s: Kendall et
    al. 2018, arXiv 1705.07115, in the form without the regression factor 1/2.
    """

    tasks: Sequence[Task]
    options: LossOptions
    loss_weight: Mapping[str, float]
    class_weight: Mapping[str, Tensor | None]
    log_variance: Mapping[str, nn.Parameter] | None = None

    def count(self, batch: Batch) -> dict[str, int]:
        """Labelled items of a batch by task; on the CPU, before it moves to the device."""
        return {task.name: count_items(task, batch.targets[task.name]) for task in self.tasks}

    def __call__(
        self, logits: Mapping[str, Tensor], batch: Batch, num_items: Mapping[str, int], share: float = 1.0
    ) -> Tensor:
        """The loss of a batch, or the part that a micro-batch has in the loss of its global batch.

        `num_items` are the labelled items of the global batch (`count`), and `share` is the part of its rows
        that this batch has.
        """
        total = torch.zeros((), device=batch.input_ids_BL.device)
        for task in self.tasks:
            name, weight = task.name, self.class_weight.get(task.name)
            target, mask_BL = batch.targets[name], batch.attention_mask_BL
            loss = loss_sum(task, logits[name], target, self.options, weight, mask_BL)
            loss = loss / max(num_items[name], 1)
            if self.log_variance is not None and num_items[name]:
                log_variance = self.log_variance[name].float()
                loss = torch.exp(-log_variance) * loss + share * log_variance
            total = total + self.loss_weight.get(name, 1.0) * loss
        return total
