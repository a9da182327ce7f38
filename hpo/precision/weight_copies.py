"""Linear layers that keep their weights in autocast's dtype too, from step to step, on a CPU.

Autocast converts every weight in each forward pass and its gradient in the backward pass. These are passes
over memory, which for a batch of short texts take longer than the products. Here a layer has a copy of its
weight in the shorter dtype: products read the copy and leave their gradient in its dtype, and the optimiser
(`optim.OnePassAdam`) reads that gradient and writes weight and copy in one pass.

The numbers are autocast's: the copy is the weight rounded to nearest, the gradient is the same product, and
over several micro-batches it adds up in fp32. What else changes a weight in place, as loading a checkpoint
does, need not know of the copy: it is made anew where the weight is of another version. PyTorch counts these,
but for changes through `.data` and by its fused optimisers.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpo.device import DeviceInfo
from hpo.precision.table import Precision


class ReducedWeight:
    """A weight's copy in a shorter dtype. Its gradient becomes the weight's: short, or fp32 where summed."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight
        self._rounded = weight.detach().to(dtype)
        self._version = weight._version
        if weight.requires_grad:
            weight.grad_dtype = None  # any
            self._rounded.requires_grad_().register_post_accumulate_grad_hook(partial(_hand_over, weight))

    def rounded(self) -> Tensor:
        """The weight, rounded to nearest."""
        if self._version != self.weight._version:
            self.refresh()
        return self._rounded

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weight anew."""
        self._rounded.copy_(self.weight)
        self._version = self.weight._version

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducedWeight:
        # The hook is none of the attributes that would be copied.
        return ReducedWeight(copy.deepcopy(self.weight, memo), self._rounded.dtype)


def _hand_over(weight: Tensor, rounded: Tensor) -> None:
    gradient, rounded.grad = rounded.grad, None
    if weight.grad is not None and gradient is not None:
        gradient = weight.grad.float().add_(gradient)
    weight.grad = gradient


def widen_gradients(model: nn.Module) -> None:
    """Give every gradient the dtype of its weight, as which others can be added to it without loss."""
    for weight in model.parameters():
        if weight.grad is not None and weight.grad.dtype != weight.dtype:
            weight.grad = weight.grad.to(weight.dtype)


class ReducedLinear(nn.Linear):
    """A linear layer with a `ReducedWeight`; without autocast it computes with the weight itself."""

    def __init__(self, linear: nn.Linear, reduced: ReducedWeight) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.reduced = reduced

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear names it
        # Another weight is one that `torch.func.functional_call` has put there.
        if torch.is_autocast_enabled("cpu") and self.weight is self.reduced.weight:
            return F.linear(input, self.reduced.rounded(), self.bias)
        return super().forward(input)


def keep_reduced_weights(
    model: nn.Module, precision: Precision, device: DeviceInfo
) -> dict[Tensor, ReducedWeight]:
    """Make every linear layer that autocast would convert to bf16 a `ReducedLinear`; the copies by weight.

    For an optimiser that reads bf16 gradients of fp32 weights, and a model that is not compiled. Left alone
    are weights that several modules share; GPUs, where conversions cost little; and fp16, whose loss scaling
    needs fp32 gradients.
    """
    if device.type != "cpu" or precision.autocast != "bfloat16" or precision.float8:
        return {}
    uses: Counter[Tensor] = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    copies: dict[Tensor, ReducedWeight] = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.weight.dtype == torch.float32 and uses[child.weight] == 1:
                copies[child.weight] = ReducedWeight(child.weight, torch.bfloat16)
                setattr(module, name, ReducedLinear(child, copies[child.weight]))
    return copies
