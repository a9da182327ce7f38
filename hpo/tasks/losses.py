"""Losses of several kinds: of items with one class, and of independent classes.

Losses are sums over the labelled items, in fp32. Python never reads a tensor's values here, so a step needs
no device sync and can be captured in a CUDA graph. Missing items are masked before the arithmetic, since a
NaN target behind `torch.where` would still give a NaN gradient.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from hpo.tasks.kind import IGNORE_INDEX, Kind
from hpo.tasks.options import LossOptions

# Balanced weights stay within these bounds: a class seen 9 times in 2000 rows would otherwise weigh 220
# times its negatives, and one mislabelled row would steer the whole head.
MIN_CLASS_WEIGHT = 0.1
MAX_CLASS_WEIGHT = 10.0


class Multiclass(Kind):
    """A kind with one class per item."""

    losses = ("cross_entropy", "focal")

    @property
    def num_choices(self) -> int:
        """Number of classes of an item."""
        return self.num_outputs

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        """Cross-entropy, or the focal loss of Lin et al. 2017 (arXiv:1708.02002), eq. 5.

        With q the target smoothed as in `F.cross_entropy` and w the class weights, an item's loss is
        sum_c w_c q_c (1 - p_c)^gamma (-log p_c): for gamma = 0 exactly `F.cross_entropy`, for a one-hot q
        the focal loss.
        """
        logits_NK, target_N = logits.reshape(-1, self.num_choices), target.reshape(-1)
        gamma, smoothing = options.gamma, options.label_smoothing
        if gamma == 0.0:
            # The default `ignore_index` is IGNORE_INDEX.
            return F.cross_entropy(logits_NK, target_N, weight, reduction="sum", label_smoothing=smoothing)
        labelled_N = target_N != IGNORE_INDEX
        log_p_NK = F.log_softmax(torch.where(labelled_N[:, None], logits_NK, 0.0), dim=-1)
        # The clamp keeps log(1 - p) and its gradient finite where p rounds to 1.
        p_NK = log_p_NK.exp().clamp(max=1 - torch.finfo(torch.float32).eps)
        loss_NK = -log_p_NK * torch.exp(gamma * torch.log1p(-p_NK))
        if weight is not None:
            loss_NK = loss_NK * weight
        loss_N = loss_NK.gather(1, target_N.clamp(min=0)[:, None]).squeeze(1)
        if smoothing:
            loss_N = (1 - smoothing) * loss_N + smoothing * loss_NK.mean(dim=-1)
        return torch.where(labelled_N, loss_N, 0.0).sum()

    def class_weights(self, targets: Iterable[Tensor]) -> Tensor:
        """Return scikit-learn's `balanced`, n / (k * count), with k the number of occurring classes: [K]."""
        per_batch = [torch.bincount(target[target >= 0], minlength=self.num_choices) for target in targets]
        counts = torch.stack(per_batch).sum(dim=0)
        return _clipped(counts.sum() / ((counts > 0).sum() * counts).clamp(min=1), counts)


class Binary(Kind):
    """A kind with independent classes."""

    losses = ("bce", "focal")
    target_type = "float32"
    has_threshold = True

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        """Binary cross-entropy, or the binary focal loss (arXiv:1708.02002, eq. 4)."""
        gamma, smoothing = options.gamma, options.label_smoothing
        labelled = target >= 0
        logits = torch.where(labelled, logits, 0.0)
        y = torch.where(labelled, target, 0.0) * (1 - smoothing) + smoothing / 2
        log_p, log_not_p = F.logsigmoid(logits), F.logsigmoid(-logits)
        positive, negative = -log_p, -log_not_p
        if gamma != 0.0:
            # (1 - p)^gamma by way of the logarithm: its gradient is finite at p = 1 for every gamma > 0.
            positive, negative = positive * torch.exp(gamma * log_not_p), negative * torch.exp(gamma * log_p)
        if weight is not None:
            positive = positive * weight
        return torch.where(labelled, y * positive + (1 - y) * negative, 0.0).sum()

    def class_weights(self, targets: Iterable[Tensor]) -> Tensor:
        """Return negatives / positives of each class, the weight of a positive: [C]."""
        rows = (target.reshape(-1, self.num_outputs) for target in targets)
        per_batch = [torch.stack([(target_NC == y).sum(dim=0) for y in (0, 1)]) for target_NC in rows]
        negatives, positives = torch.stack(per_batch).sum(dim=0)
        return _clipped(negatives / positives.clamp(min=1), positives)


def _clipped(weights: Tensor, counts: Tensor) -> Tensor:
    """Clip the weights; an absent class has weight 1."""
    return weights.clamp(MIN_CLASS_WEIGHT, MAX_CLASS_WEIGHT).where(counts > 0, 1.0)
