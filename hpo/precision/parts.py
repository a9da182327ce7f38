"""Modules that compute in fp32 inside a model of another precision.

Such a module runs without autocast on inputs cast to fp32, whose weights are in fp32, so all of it is fp32.
What comes out depends on what is around it. Under autocast it stays fp32: what follows casts its own inputs,
and a value beyond fp16's range reaches a residual sum or a norm, which are fp32, as it is. Where the weights
around it are bf16 (`bf16-true`), whose products need equal dtypes, it is cast back.

It is done by the module's class: a subclass that has another `forward` and nothing else. So names, weights,
`torch.compile`, hooks and copies of the model are what they were, activation checkpointing computes again
in fp32 what it computed in fp32, and the plain class can be given back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_REDUCED = (torch.float16, torch.bfloat16)


class InFloat32(nn.Module):
    """Put before a module's class by `run_in_float32`."""

    weights_around: torch.dtype = torch.float32
    """Of the model around it; what comes out has this dtype where no input has a floating-point one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device_type = next((tensor.device.type for tensor in given), "cpu")
        is_autocast = torch.is_autocast_enabled(device_type)
        dtypes = [tensor.dtype for tensor in given if tensor.is_floating_point()]
        args, kwargs = tree_map(_to_float32, (args, kwargs))
        with torch.autocast(device_type, enabled=False):
            output = super().forward(*args, **kwargs)
        around = dtypes[0] if dtypes else self.weights_around
        return output if is_autocast or around not in _REDUCED else tree_map(_cast(around), output)


class LossInFloat32:
    """Put before the class of a loss: what follows the logits runs without autocast, on fp32 logits."""

    def __call__(self, forward: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        logits = forward(batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL)
        with torch.autocast(batch.input_ids_BL.device.type, enabled=False):
            floats = tree_map(_to_float32, logits)
            return super().__call__(lambda *_: floats, batch, *args, **kwargs)  # type: ignore[misc]


def run_in_float32(module: nn.Module) -> None:
    """Let `module` compute in fp32 whatever is around it; its weights must be fp32."""
    _put_before(InFloat32, module)


def loss_in_float32(loss_fn: Any) -> None:
    """Let a `MultitaskLoss` compute in fp32, but for the model that it calls."""
    _put_before(LossInFloat32, loss_fn)


def run_as_before(one: Any) -> None:
    """Undo `run_in_float32` of a module, or `loss_in_float32`; of any other nothing."""
    if isinstance(one, (InFloat32, LossInFloat32)):
        one.__class__ = type(one).__mro__[2]
        vars(one).pop("weights_around", None)


def float32_modules(model: nn.Module) -> set[str]:
    """The names of all modules that compute in fp32 by `run_in_float32`, with those inside them."""
    roots = [name for name, module in model.named_modules() if isinstance(module, InFloat32)]
    names = (name for name, _ in model.named_modules())
    return {name for name in names if any(f"{name}.".startswith(f"{root}.") for root in roots)}


def convert_weights(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model.to(dtype)`, but for the weights of what computes in fp32, which are kept as they are."""
    roots = [module for module in model.modules() if isinstance(module, InFloat32)]
    kept = [(module, {key: value.clone() for key, value in module.state_dict().items()}) for module in roots]
    model = model.to(dtype)
    for module, weights in kept:
        module.float().load_state_dict(weights)
        module.weights_around = dtype
    return model


@contextlib.contextmanager
def weights_around_are_float32(model: nn.Module) -> Iterator[None]:
    """While the model is called with fp32 copies of its weights."""
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, InFloat32):
                undo.callback(setattr, module, "weights_around", module.weights_around)
                module.weights_around = torch.float32
        yield


def _put_before(before: Any, one: Any) -> None:
    if not isinstance(one, before):
        one.__class__ = _subclass(before, cast(Any, type(one)))


@cache
def _subclass(before: Any, plain: Any) -> Any:
    return type(plain.__name__, (before, plain), {"__module__": plain.__module__})


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _REDUCED else value


def _cast(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda value: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
