"""Linear layers on a CPU in fp32 by oneDNN, with their weights laid out for it beforehand.

PyTorch gives fp32 products of a CPU to MKL, which on AMD's processors reaches about half of what oneDNN does:
on an EPYC with AVX-512, one thread, 512 x 384 times 384 x 384, 102 against 214 GFLOP/s. `torch.compile` packs
weights for oneDNN in the same way when it freezes a model, but needs a compiler and minutes. The results
differ in the order of summation alone: by 5e-8 in probabilities of MiniLM, as those of two batch sizes do.

The layouts are a second copy of the weights. They hold for inference alone: no gradient passes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class PackedLinears:
    """Layouts of a model's linear weights, made once and again after a weight has changed."""

    def __init__(self) -> None:
        self._packed: dict[nn.Linear, tuple[tuple[int, int], Tensor]] = {}

    @contextmanager
    def used_in(self, model: nn.Module) -> Iterator[None]:
        """Run the plain linear layers of `model` on packed weights in the block, where this CPU can.

        Of a model on another device, or with other weights than fp32, nothing changes.
        """
        layers = [module for module in model.modules() if type(module) is nn.Linear and _can_pack(module)]
        try:
            for layer in layers:
                vars(layer)["forward"] = partial(_linear, self._layout(layer), layer.bias)
            yield
        finally:
            for layer in layers:
                vars(layer).pop("forward", None)

    def _layout(self, layer: nn.Linear) -> Tensor:
        now = (layer.weight.data_ptr(), layer.weight._version)
        known = self._packed.get(layer)
        if known is None or known[0] != now:
            ops: Any = torch.ops.mkldnn
            known = self._packed[layer] = (now, ops._reorder_linear_weight(layer.weight.detach(), None))
        return known[1]


def _can_pack(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _linear(packed: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    ops: Any = torch.ops.mkldnn
    output: Tensor = ops._linear_pointwise(inputs, packed, bias, "none", [], "")
    return output
