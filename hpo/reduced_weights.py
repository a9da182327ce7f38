"""Linear layers that keep their weights in autocast's dtype too, from step to step, on a CPU.

Autocast converts every weight in each forward pass and its gradient in the backward pass. These are passes
over memory, which for a batch of short texts take longer than the products. Here a layer has a copy of its
weight in the shorter dtype: products read the copy and leave their gradient in its dtype, and the optimiser
(`optim.OnePassAdam`) reads that gradient and writes weight and copy in one pass.

The numbers are autocast's: the copy is the weight rounded to nearest, the gradient is the same product, and
over several micro-batches it adds up in fp32. What else changes a weight in place, as loading a checkpoint
does, need not know of the copy: it is made anew where the weight is of another version (which PyTorch counts,
but for changes through `.data`).
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpo.device import DeviceInfo
from hpo.precision import Precision


class ReducedWeight:
    """The copy of a weight. Its gradient becomes the weight's: in the copy's dtype or, where summed, fp32."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight
        self._values = weight.detach().to(dtype)
        self._version = weight._version
        if weight.requires_grad:
            weight.grad_dtype = None  # any
            self._values.requires_grad_().register_post_accumulate_grad_hook(self._hand_over_gradient)

    def values(self) -> Tensor:
        """The weight, rounded to nearest."""
        if self._version != self.weight._version:
            self.refresh()
        return self._values

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weight anew."""
        self._values.copy_(self.weight)
        self._version = self.weight._version

    def _hand_over_gradient(self, values: Tensor) -> None:
        gradient, values.grad = values.grad, None
        if self.weight.grad is not None and gradient is not None:
            gradient = self.weight.grad.float().add_(gradient)
        self.weight.grad = gradient


class ReducedLinear(nn.Linear):
    """A linear layer with a `ReducedWeight`; without autocast it computes with the weight itself."""

    def __init__(self, linear: nn.Linear, reduced: ReducedWeight) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.reduced = reduced

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear names it
        if torch.is_autocast_enabled("cpu"):
            return F.linear(input, self.reduced.values(), self.bias)
        return super().forward(input)


def keep_reduced_weights(
    model: nn.Module, precision: Precision, device: DeviceInfo
) -> dict[Tensor, ReducedWeight]:
    """Make every linear layer that autocast would convert to bf16 a `ReducedLinear`; the copies by weight.

    For an optimiser that reads bf16 gradients of fp32 weights. Left alone are weights that several modules
    share; GPUs, where conversions cost little; and fp16, whose loss scaling needs fp32 gradients.
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
