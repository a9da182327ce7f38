"""Dropout on a CPU at the price of random bits.

PyTorch draws a CPU's dropout masks one Bernoulli number at a time: about 5 ns an element, an eighth of a bf16
training step of MiniLM or more. Here a mask is 16 random bits an element from numpy's SFC64 (0.4 ns),
compared with a threshold, which makes all ones where the element is kept and all zeros where it is dropped; a
bitwise AND with the element's bits then drops it. So p is met to 1/65536.

The generator is seeded from torch's, so `torch.manual_seed` decides the masks, and gradient checkpointing,
which puts torch's generator back, draws the same ones again. Masks do not depend on the number of threads,
and differ from `F.dropout`'s of the same seed. What is dropped is 0 even where it was infinite or NaN. On a
GPU, in compiled code and outside of training everything is PyTorch's.
"""

from __future__ import annotations

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
"""The integers of a dtype's width, as which its bits can be taken."""


class _TorchWords(ISeedSequence):
    """Seeds numpy's generators with words from torch's global one, which are random as they are."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        words = torch.empty(n_words, dtype=torch.int64).random_(-(2**63), None).numpy()
        return words.view(np.uint64).astype(dtype)


class DropoutMaskGenerator:
    """A stream of dropout masks, begun from torch's global generator."""

    def __init__(self) -> None:
        self._generator = np.random.SFC64(_TorchWords())  # type: ignore[arg-type]

    def keep_mask(self, shape: Sequence[int], p: float) -> Tensor:
        """int16 of this shape: -1, which is all ones, with probability 1 - p; else 0."""
        size = math.prod(shape)
        bits = torch.from_numpy(self._generator.random_raw(-(-size // 4)).view(np.int16)[:size])
        threshold = min(round((1 - p) * 0x10000), 0xFFFF) - 0x8000
        mask = torch.lt(bits, threshold, out=torch.empty(size, dtype=torch.int16))
        return mask.neg_().view(tuple(shape))


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """A copy of `values` that is 0 where the mask of `DropoutMaskGenerator` is; without one, `values`."""
    if mask is None:
        return values
    integers = INTEGERS[values.dtype]
    return torch.bitwise_and(values.view(integers), mask.to(integers)).view(values.dtype)


def is_fast_here(*tensors: Tensor) -> bool:
    """Whether masks from bits work for these: on a CPU, in 16 or 32 bits, not under the compiler."""
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
    """`nn.Dropout` that draws its masks from random bits where that is possible."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Dropout names it
        if self.training and 0 < self.p < 1 and is_fast_here(input):
            dropped: Tensor = _MaskAndScale.apply(input, self.p)  # type: ignore[no-untyped-call]
            return dropped
        return super().forward(input)


def use_bit_dropout(model: nn.Module) -> None:
    """Put a `BitDropout` in the place of every `nn.Dropout` of the model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, BitDropout(child.p))
