"""Modules that compute in fp32 inside a model of another precision.

Such a module runs without autocast on inputs cast to fp32, and its weights are in fp32, so all of it is fp32.
What comes out stays fp32: what follows casts its inputs, and a value beyond fp16's range reaches a residual
sum or a norm, which are fp32, as it is.

It is done by the module's class: a subclass that has another `forward` and nothing else. So names, weights,
`torch.compile`, hooks and copies of the model are what they were, activation checkpointing computes again
in fp32 what it computed in fp32, and the plain class can be given back.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_REDUCED = (torch.float16, torch.bfloat16)


class InFloat32(nn.Module):
    """Put before a module's class by `run_in_float32`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        device_type = next((tensor.device.type for tensor in tensors), "cpu")
        args, kwargs = tree_map(_to_float32, (args, kwargs))
        with torch.autocast(device_type, enabled=False):
            return super().forward(*args, **kwargs)


def run_in_float32(module: nn.Module) -> None:
    """Let `module` compute in fp32 whatever is around it; its weights must be fp32."""
    if not isinstance(module, InFloat32):
        module.__class__ = _subclass(cast(Any, type(module)))


def run_as_before(module: nn.Module) -> None:
    """Undo `run_in_float32`; of any other module nothing."""
    if isinstance(module, InFloat32):
        module.__class__ = type(module).__mro__[2]


def float32_modules(model: nn.Module) -> set[str]:
    """The names of all modules that compute in fp32 by `run_in_float32`, with those inside them."""
    roots = [name for name, module in model.named_modules() if isinstance(module, InFloat32)]
    names = (name for name, _ in model.named_modules())
    return {name for name in names if any(f"{name}.".startswith(f"{root}.") for root in roots)}


@cache
def _subclass(plain: Any) -> Any:
    return type(plain.__name__, (InFloat32, plain), {"__module__": plain.__module__})


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _REDUCED else value
