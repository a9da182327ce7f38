"""Which operator made the first number that was not finite, and in which module.

Every operator that runs in the block is seen with its real inputs and outputs, after autocast has cast them.
What is not finite is followed from output to input, by the storage of tensors, so of many operators with such
outputs the one is named that the loss or gradient in question goes back to. An operator is such an origin
where its inputs were finite. A -inf that masks (a fill, or what a -inf was added to) is none, unless it
becomes a NaN, as in the softmax over a row that is masked as a whole: then that is the origin. Numbers that
are taken for their bits (`hpo.models.dropout`) are followed as integers.

The module of a forward operator is the innermost that runs. Nodes of the autograd graph are labelled with it
as modules end, so that operators of the backward pass have theirs too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpo.trial.nonfinite import is_finite

_MASKING = {"full", "full_like", "new_full", "scalar_tensor", "fill", "masked_fill", "where", "log"}
"""Operators that give -inf on purpose."""


@dataclass(frozen=True)
class TensorStatistics:
    """A tensor in numbers; the extremes are of its finite elements, None where there are none."""

    shape: tuple[int, ...]
    dtype: str
    low: float | None
    high: float | None
    absmax: float | None
    nonfinite_share: float

    @classmethod
    def of(cls, tensor: Tensor) -> TensorStatistics:
        values = tensor.detach().float()
        finite = values[values.isfinite()]
        low, high = (float(v) for v in torch.aminmax(finite)) if finite.numel() else (None, None)
        absmax = None if low is None or high is None else max(abs(low), abs(high))
        share = (values.numel() - finite.numel()) / max(values.numel(), 1)
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), low, high, absmax, share)


@dataclass(frozen=True)
class Origin:
    """An operator that turned finite numbers into others."""

    module: str | None
    """The innermost module that it ran in; "" is the model itself, None what is after it: the loss."""
    operator: str
    phase: str
    """`forward` or `backward`."""
    inputs: tuple[TensorStatistics, ...]
    outputs: tuple[TensorStatistics, ...]
    inputs_finite: bool
    """False where a number was not finite before the block, such as a weight."""

    @property
    def place(self) -> str:
        """`module` in words."""
        return "the loss, after the logits" if self.module is None else self.module or "the model itself"


class OriginTracer(TorchDispatchMode):
    """Follows what is not finite through the operators of a block; `trace_origins` makes it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running: list[str] = []
        self._module_of: dict[Any, str] = {}
        self._tainted: dict[int, tuple[Origin, Tensor]] = {}  # the tensor keeps the address from another

    def origin(self, tensor: Tensor) -> Origin | None:
        """Where what is not finite in `tensor` comes from; None: from nowhere in the block."""
        found = self._tainted.get(_storage(tensor))
        return found[0] if found else None

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _floating((args, kwargs))
        mutates = func._schema.is_mutable
        before = [tensor.clone() for tensor in inputs] if mutates else inputs
        result = func(*args, **kwargs)
        bits = _integers((args, kwargs))
        self._follow_bits(bits, result)
        broken = [tensor for tensor in _floating(result) if not is_finite(tensor)]
        if not broken:
            if mutates:
                self._forget(_floating(result))
            return result
        roots = [
            self._tainted[key][0] for tensor in (*inputs, *bits) if (key := _storage(tensor)) in self._tainted
        ]
        was_finite = all(map(is_finite, before))
        masks = func._schema.name.split("::")[1].rstrip("_") in _MASKING or not was_finite
        if roots:
            origin = roots[0]
        elif masks and all(map(_only_masks, broken)):
            return result
        else:
            module, phase = self._where()
            origin = Origin(
                module,
                str(func),
                phase,
                inputs=tuple(map(TensorStatistics.of, before)),
                outputs=tuple(map(TensorStatistics.of, broken)),
                inputs_finite=all(is_finite(tensor) or _only_masks(tensor) for tensor in before),
            )
        self._tainted |= {_storage(tensor): (origin, tensor) for tensor in broken}
        return result

    def _where(self) -> tuple[str | None, str]:
        """The module and phase of the operator that runs."""
        node = torch._C._current_autograd_node()
        # A forward pass within the backward pass computes activations again.
        if node is None or self._running:
            return (self._running[-1] if self._running else None), "forward"
        return self._module_of.get(node), "backward"

    def _follow_bits(self, inputs: list[Tensor], result: Any) -> None:
        if roots := [found for bits in inputs if (found := self._tainted.get(_storage(bits)))]:
            self._tainted |= {_storage(bits): (roots[0][0], bits) for bits in _integers(result)}

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                self._tainted.pop(_storage(tensor), None)

    def entered(self, name: str, _module: nn.Module, *inputs: Any) -> None:
        """Before a module's forward: what its inputs were made of belongs to the module around it."""
        if self._running:
            self._label(inputs, self._running[-1])
        self._running.append(name)

    def left(self, name: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        """After a module's forward."""
        self._label(output, name)
        self._running.pop()

    def _label(self, values: Any, name: str) -> None:
        """Note that `name` is the module of all nodes behind `values` that have none yet."""
        nodes = [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in self._module_of:
                self._module_of[node] = name
                nodes += [before for before, _ in node.next_functions]


@contextlib.contextmanager
def trace_origins(model: nn.Module) -> Iterator[OriginTracer]:
    """Follow what is not finite through the forward and backward passes of `model` in the block."""
    tracer = OriginTracer()
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(partial(tracer.entered, name), with_kwargs=True)
            # After an error too: the modules around it may catch it.
            after = module.register_forward_hook(
                partial(tracer.left, name), with_kwargs=True, always_call=True
            )
            hooks.enter_context(before)
            hooks.enter_context(after)
        with tracer:
            yield tracer


def _floating(values: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.layout == torch.strided]


def _integers(values: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.dtype in (torch.int16, torch.int32)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _only_masks(tensor: Tensor) -> bool:
    """Whether all that is not finite is -inf."""
    return not bool((tensor.isnan() | tensor.isposinf()).any())
