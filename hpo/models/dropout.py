"""Dropout on a CPU at the price of random bits.

PyTorch draws a CPU's dropout masks one Bernoulli number at a time: about 5 ns an element, an eighth of a bf16
training step of MiniLM or more. Here a mask takes 16 random bits an element from numpy's SFC64 (0.4 ns). A
comparison with a threshold gives all ones (keep) or all zeros (drop), for a bitwise AND with the element's
bits. So p is exact to 1/65536.

The generator is seeded from torch's, so `torch.manual_seed` decides the masks, and gradient checkpointing
draws the same ones again. Masks do not depend on the number of threads, and differ from those of `F.dropout`.
A dropped value is 0 even if it was infinite or NaN. On a GPU, in compiled code and outside of training,
PyTorch's own dropout runs.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""Integer dtype of the same width."""


class _TorchWords(ISeedSequence):
    """Seeds numpy's generators with random words from torch's global one."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        words = torch.empty(n_words, dtype=torch.int64).random_(-(2**63), None).numpy()
        return words.view(np.uint64).astype(dtype)


class DropoutMaskGenerator:
    """Stream of dropout masks, seeded from torch's global generator."""

    def __init__(self) -> None:
        self._generator = np.random.SFC64(_TorchWords())  # type: ignore[arg-type]

    def keep_mask(self, shape: Sequence[int], p: float) -> Tensor:
        """Return int16 of this shape: -1 (all ones) with probability 1 - p, else 0."""
        size = math.prod(shape)
        bits = torch.from_numpy(self._generator.random_raw(-(-size // 4)).view(np.int16)[:size])
        threshold = min(round((1 - p) * 0x10000), 0xFFFF) - 0x8000
        mask = torch.lt(bits, threshold, out=torch.empty(size, dtype=torch.int16))
        return mask.neg_().view(tuple(shape))


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Copy `values`, with 0 at the zeros of a mask of `DropoutMaskGenerator`. Without a mask, return them."""
    if mask is None:
        return values
    integers = INTEGERS[values.dtype]
    return torch.bitwise_and(values.view(integers), mask.to(integers)).view(values.dtype)


def is_fast_here(*tensors: Tensor) -> bool:
    """Return True if masks from bits work: on a CPU, in 16 or 32 bits, not under the compiler."""
    return not torch.compiler.is_compiling() and all(
        tensor.device.type == "cpu" and tensor.dtype in INTEGERS for tensor in tensors
    )


class _MaskAndScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, p: float) -> Tensor:
        mask = DropoutMaskGenerator().keep_mask(values.shape, p)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p)
        return masked(values, mask).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return masked(gradients[0], mask).mul_(ctx.scale), None


class BitDropout(nn.Dropout):
    """`nn.Dropout` with masks from random bits, where possible."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Dropout names it
        if self.training and 0 < self.p < 1 and is_fast_here(input):
            dropped: Tensor = _MaskAndScale.apply(input, self.p)  # type: ignore[no-untyped-call]
            return dropped
        return super().forward(input)


def use_bit_dropout(model: nn.Module) -> None:
    """Replace every `nn.Dropout` of the model by a `BitDropout`."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, BitDropout(child.p))
