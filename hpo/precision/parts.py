"""Parts of a model in fp32 under bf16 or fp16 autocast.

A part runs without autocast on fp32 inputs and weights. Its output stays fp32: autocast casts the inputs of
the next product, and a value beyond the range of fp16 reaches a residual sum or a norm unchanged.

The part gets a subclass of its class with another `forward`. Names, weights, hooks and copies of the model
stay the same, `torch.compile` traces the new `forward`, and activation checkpointing repeats it. An
`nn.Embedding` keeps its class, because a lookup multiplies nothing. Under fp8, parts compute in bf16.

Related work chooses parts by a rule or an estimate: a fixed recipe (NVFP4 pretraining, arXiv 2509.25149),
ranks by the largest eigenvalue of the Hessian (HAWQ, arXiv 1905.03696), or a prediction from other models
(PEPPP, arXiv 2106.09686). `hpo.trial.part_search` measures sets of parts on this model, data and device,
because errors of parts do not add.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

REDUCED = (torch.float16, torch.bfloat16)


class InFloat32(nn.Module):
    """The first base class of a part."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        device_type = next((tensor.device.type for tensor in tensors), "cpu")
        args, kwargs = tree_map(to_float32, (args, kwargs))
        with torch.autocast(device_type, enabled=False):
            return super().forward(*args, **kwargs)


def run_in_float32(module: nn.Module) -> None:
    """Let `module` compute in fp32 under any autocast. Its weights must be fp32."""
    if not isinstance(module, InFloat32 | nn.Embedding):
        module.__class__ = _subclass(cast(Any, type(module)))


def run_as_before(model: nn.Module) -> None:
    """Undo `run_in_float32` in all modules of `model`."""
    for module in model.modules():
        if isinstance(module, InFloat32):
            module.__class__ = type(module).__mro__[2]


def float32_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all parts in fp32 and the modules inside them by name."""
    roots = [f"{name}." for name, module in model.named_modules() if isinstance(module, InFloat32)]
    named = model.named_modules()
    return {name: module for name, module in named if any(f"{name}.".startswith(root) for root in roots)}


def float32_weights(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights of `float32_modules`, by their first name if they are shared."""
    inside = {id(weight) for module in float32_modules(model).values() for weight in module.parameters()}
    return frozenset(name for name, weight in model.named_parameters() if id(weight) in inside)


@cache
def _subclass(plain: Any) -> Any:
    return type(plain.__name__, (InFloat32, plain), {"__module__": plain.__module__})


def to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in REDUCED else value
