"""Which module of a model made a number that is not finite, or raised an error: seen by hooks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. Tests the extremes (NaN propagates): faster than each value."""
    return not values.numel() or bool(torch.stack(torch.aminmax(values.detach())).isfinite().all())


@contextlib.contextmanager
def entered_module(model: nn.Module) -> Iterator[list[str]]:
    """A list that holds the name of the module whose forward began last."""
    entered: list[str] = []

    def note(name: str, *_: Any) -> None:
        entered[:] = [name]

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name)))
        yield entered


@contextlib.contextmanager
def watch_for_nonfinite(model: nn.Module) -> Iterator[list[str]]:
    """A list of the modules, in order, that turned finite values into others in the block."""
    found: list[str] = []

    def forward_hook(name: str, _module: nn.Module, before: Any, after: Any) -> None:
        if _all_finite(before) and not _all_finite(after):
            found.append(name)

    def backward_hook(name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        forward_hook(name, module, grad_output, grad_input)

    with contextlib.ExitStack() as hooks, warnings.catch_warnings():
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(forward_hook, name)))
                hooks.enter_context(module.register_full_backward_hook(partial(backward_hook, name)))
        # Warned of modules whose inputs need no gradient, such as embeddings, and of those that return no
        # tensor: the modules inside them are watched.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="For backward hooks to be called")
        yield found


def _all_finite(values: Any) -> bool:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return all(is_finite(tensor) for tensor in tensors if tensor.is_floating_point())
