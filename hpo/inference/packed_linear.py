"""Linear layers in fp32 on a CPU by oneDNN, with packed weights; no gradient passes them.

PyTorch gives these products to MKL, which on AMD's processors has about half of oneDNN's speed: on an EPYC
with AVX-512, one thread, 512 x 384 times 384 x 384, 102 against 214 GFLOP/s. `torch.compile` packs weights in
the same way when it freezes a model, but needs a compiler and minutes. The results differ only in the order
of summation: by 5e-8 in probabilities of MiniLM, like those of two batch sizes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class PackedLinears:
    """Packed copies of a model's linear weights, renewed after a weight has changed."""

    def __init__(self) -> None:
        self._packed: dict[nn.Linear, tuple[tuple[int, int], Tensor]] = {}

    @contextmanager
    def used_in(self, model: nn.Module) -> Iterator[None]:
        """Run the fp32 linear layers of `model` on packed weights inside the block, if they are on a CPU."""
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
