"""The conditions of a pass in a check: those of training, equal for both sides, and undone after it.

Both sides draw the same random numbers, so that a difference comes from the precision. Modules train, because
some compute another thing in evaluation: a norm by running statistics, a detector that returns no loss.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hpo.precision.parts import to_float32


@contextlib.contextmanager
def training_without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode without dropout during the block, and leave it without gradients.

    Modules in another mode than the model keep it. A rate of dropout that is no attribute of a module stays:
    both sides drop the same values.
    """
    trains = {module for module in model.modules() if module.training == model.training}
    with unchanged(model):
        model.eval()
        for module in trains:
            module.training = not isinstance(module, _DropoutNd)
            rates = {name for name, value in vars(module).items() if isinstance(value, float)}
            for name in rates:
                if "drop" in name or (name == "p" and not module.training):
                    setattr(module, name, 0.0)
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore modules, modes, the formats of weights, and the values of buffers after the block.

    So a model can be prepared, compiled and called without a copy. Values of weights must not change.
    """
    modules = [(module, type(module), module.training, dict(vars(module))) for module in model.modules()]
    containers = [
        (value, value.copy())
        for *_, values in modules
        for value in values.values()
        if isinstance(value, dict | list)
    ]
    weights = [(weight, weight.data) for weight in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, kind, mode, values in modules:
            if type(module) is not kind:
                module.__class__ = kind
            for name in vars(module).keys() - values.keys():
                del vars(module)[name]
            vars(module).update(values)
            module.training = mode
        for container, before in containers:
            container.clear()
            container.update(before) if isinstance(container, dict) else container.extend(before)
        with torch.no_grad():
            for weight, data in weights:
                if weight.dtype != data.dtype:
                    weight.data = data
            for buffer, value in buffers:
                # A buffer with repeated values, as of `expand`, cannot be written.
                if buffer.layout != torch.strided or not torch.equal(buffer, value):
                    buffer.copy_(value)


_DRAWS = re.compile("aten::(rand|normal|uniform|bernoulli|exponential|log_normal|cauchy|geometric)")
_LOST_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""{format: bits of fp32's fraction beyond its own}."""


class SameDraws(TorchDispatchMode):
    """A block in which random numbers in bf16 and fp16 are those of fp32, cut to the format.

    PyTorch draws other numbers of the same seed in another format.
    """

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of = args[0] if args and isinstance(args[0], Tensor) else None
        dtype = kwargs.get("dtype") or (torch.float32 if of is None else of.dtype)
        if dtype not in _LOST_BITS or not _DRAWS.match(func.name()):
            return func(*args, **kwargs)
        args, kwargs = tree_map(
            lambda one: torch.float32 if one is dtype else to_float32(one), (args, kwargs)
        )
        drawn, bits = func(*args, **kwargs), _LOST_BITS[dtype]
        # Rounded towards 0: a uniform number stays below 1.
        drawn = (drawn.view(torch.int32) >> bits << bits).view(torch.float32).to(dtype)
        return of.copy_(drawn) if of is not None and func._schema.is_mutable else drawn
