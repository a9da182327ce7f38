"""How far each module of a model is from fp32 under a precision.

Two numbers. The error of a module's output in the model as it runs is what has come together up to there.
The own error is what the module adds: it is given the inputs that it has in fp32, and its output is compared
with fp32's. Both are relative, ||y - y32|| / ||y32||. A module whose error is that of a module inside it is
left out, and so are those that hold a list of layers, and those that no logits depend on, such as a pooler
that nothing asks.

Outputs alone are compared, in evaluation mode. Gradients may be far from fp32's by another module.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hpo.data.batches import Batch
from hpo.models.attention import use_training_attention
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.effective import first_float
from hpo.precision.table import PRECISIONS
from hpo.trial.measure import relative_error

EXPLAINED = 0.7
"""A module is left out where one inside it has at least this share of its own error."""


@dataclass(frozen=True)
class ModuleError:
    """A module's distance from fp32."""

    module: str
    kind: str
    """Its class."""
    own_error: float
    error: float


def module_errors(model: MultitaskModel, mixed_precision: MixedPrecision, batch: Batch) -> list[ModuleError]:
    """The modules of `model`, whose weights are fp32, on a batch; the farthest first. Dropout is off."""
    amp, device = mixed_precision, mixed_precision.device
    reduced = prepare_model(copy.deepcopy(model), amp.precision).eval()
    batch = batch.to(device.torch_device)
    inputs = (batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL)
    reference: dict[str, Any] = {}
    together: dict[str, Any] = {}
    nodes: dict[str, list[Any]] = {}
    own: dict[str, float] = {}
    weights = getattr(torch, amp.precision.weights)

    def compare(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value = _tensor(output)
        if value is None:
            return
        reference[name] = value
        args, kwargs = tree_map(partial(_cast, weights), (args, kwargs))
        with backend_flags(amp.precision, amp.config), amp.autocast():
            again = reduced.get_submodule(name)(*args, **kwargs)
        own[name] = relative_error(_tensor(again), reference[name])

    def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        together[name] = _tensor(output)
        nodes[name] = _nodes(output)

    was_training = model.training
    names = [name for name, module in model.named_modules() if name and not _has_layers(module)]
    try:
        model.eval()
        for parameter in reduced.parameters():  # frozen ones too: the graph tells what the logits depend on
            parameter.requires_grad_(parameter.is_floating_point())
        with contextlib.ExitStack() as hooks, backend_flags(amp.precision, amp.config), amp.autocast():
            hooks.enter_context(use_training_attention())
            for name in names:
                hooks.enter_context(reduced.get_submodule(name).register_forward_hook(partial(keep, name)))
            needed = _nodes_behind(_nodes(reduced(*inputs)))
        with contextlib.ExitStack() as hooks, backend_flags(PRECISIONS["fp32"], amp.config), torch.no_grad():
            hooks.enter_context(use_training_attention())
            for name in names:
                hook = model.get_submodule(name).register_forward_hook(
                    partial(compare, name), with_kwargs=True
                )
                hooks.enter_context(hook)
            model(*inputs)
    finally:
        model.train(was_training)
    errors = [
        ModuleError(
            name, type(model.get_submodule(name)).__name__, own[name], relative_error(together[name], value)
        )
        for name, value in reference.items()
        # A module that needs no gradient has no node.
        if name in together and (not nodes[name] or not needed.isdisjoint(nodes[name]))
    ]
    return sorted(_unexplained(errors), key=lambda one: one.own_error, reverse=True)


def _unexplained(errors: list[ModuleError]) -> Iterator[ModuleError]:
    for one in errors:
        inside = (other.own_error for other in errors if other.module.startswith(f"{one.module}."))
        if max(inside, default=0.0) < EXPLAINED * one.own_error or one.own_error == 0:
            yield one


def _nodes(output: Any) -> list[Any]:
    """Of the autograd graph, those that made the tensors of `output`."""
    tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _nodes_behind(nodes: list[Any]) -> set[Any]:
    """These nodes of the autograd graph, and all that they go back to."""
    found = set(nodes)
    while nodes:
        before = [node for node, _ in nodes.pop().next_functions if node is not None and node not in found]
        found.update(before)
        nodes += before
    return found


def _tensor(output: Any) -> Any:
    value = first_float(output)
    return None if value is None else value.detach().float()


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _has_layers(module: nn.Module) -> bool:
    """Whether it holds a list of modules, or is one: what it adds is what they add."""
    return any(isinstance(one, (nn.ModuleList, nn.ParameterList)) for one in module.modules())
