"""Sums of losses over the labelled items, in fp32, and the weights of classes in them.

Nothing here looks at a tensor's values from Python, so a step needs no device sync and can be captured in a
CUDA graph. Missing items are masked before the arithmetic and not only after it: a NaN target behind
`torch.where` would still give a NaN gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from hpo.tasks.kind import IGNORE_INDEX

# Balanced weights stay within these bounds: a class seen 9 times in 2000 rows would otherwise weigh 220
# times its negatives, and one mislabelled row would steer the whole head.
MIN_CLASS_WEIGHT = 0.1
MAX_CLASS_WEIGHT = 10.0


def multiclass_sum(
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


def binary_sum(
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


def position_sum(logits_BL2: Tensor, target_B2: Tensor, real_BL: Tensor, label_smoothing: float) -> Tensor:
    """Mean of the start's and the end's cross-entropy over the real positions, summed over rows."""
    real_BL1 = real_BL[:, :, None]
    masked_BL2 = torch.where(real_BL1, logits_BL2, torch.finfo(torch.float32).min)
    log_p_BL2 = F.log_softmax(masked_BL2, dim=1)
    loss_B2 = -log_p_BL2.gather(1, target_B2.clamp(min=0)[:, None, :]).squeeze(1)
    if label_smoothing:
        uniform_B2 = -torch.where(real_BL1, log_p_BL2, 0.0).sum(dim=1) / real_BL1.sum(dim=1)
        loss_B2 = (1 - label_smoothing) * loss_B2 + label_smoothing * uniform_B2
    return torch.where(target_B2 != IGNORE_INDEX, loss_B2, 0.0).sum() / 2


def regression_sum(output_B: Tensor, target_B: Tensor, loss: str, mean: float, std: float) -> Tensor:
    """Squared error, or the Huber loss with delta 1, in units of the train split's standard deviation."""
    labelled_B = ~torch.isnan(target_B)
    target_B = (torch.where(labelled_B, target_B, 0.0) - mean) / (std or 1.0)
    output_B = torch.where(labelled_B, output_B, 0.0)
    function = F.huber_loss if loss == "huber" else F.mse_loss
    return torch.where(labelled_B, function(output_B, target_B, reduction="none"), 0.0).sum()


def binary_weights(targets: Iterable[Tensor], num_classes: int) -> Tensor:
    """Negatives / positives of each class, clipped, the weight of a positive: float32 [C]."""
    rows = (target.reshape(-1, num_classes) for target in targets)
    per_batch = [torch.stack([(target_NC == value).sum(dim=0) for value in (0, 1)]) for target_NC in rows]
    negatives, positives = torch.stack(per_batch).sum(dim=0)
    return _clipped(negatives / positives.clamp(min=1), positives)


def multiclass_weights(targets: Iterable[Tensor], num_classes: int) -> Tensor:
    """scikit-learn's `balanced`, n / (k * count), of k classes that occur, clipped: float32 [K]."""
    per_batch = [torch.bincount(target[target != IGNORE_INDEX], minlength=num_classes) for target in targets]
    counts = torch.stack(per_batch).sum(dim=0)
    return _clipped(counts.sum() / ((counts > 0).sum() * counts).clamp(min=1), counts)


def _clipped(weights: Tensor, counts: Tensor) -> Tensor:
    return torch.where(counts > 0, weights.clamp(MIN_CLASS_WEIGHT, MAX_CLASS_WEIGHT), 1.0)
