"""The weights of a model, followed from operator to operator.

Each tensor of a pass has an origin: weights, constants, data, or a mixture of weights and data. A tensor made
of weights and constants is a weight, a tensor made of data an activation. A mixture may be either, such as a
weight with a computed mask or hidden states with an added scale. If it may be a matrix to multiply by, it
counts as a weight without a measurement.

Buffers and tensors among the attributes of a module are constants with a name. A mixture of these with data
is data: many are masks and positions.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

UNMEASURED = "unmeasured"
WIDEST_FIRST = ["float64", "float32", "tf32", "float16", "bfloat16", "float8", UNMEASURED]
_NO_COPY = re.compile(r"^new_|_like$|^lift_fresh$")
"""Operators on shapes, dtypes and Python numbers, not on a tensor's values."""


class Weight(NamedTuple):
    """A parameter, a buffer or an attribute, or a tensor made of one."""

    name: str
    narrowest: str
    """Narrowest format of all casts on the way. UNMEASURED: data were mixed into the weight."""
    dims: int
    """Dimensions of the parameter; 0 for a vector."""


def _matrix_dims(tensor: Tensor) -> int:
    return tensor.dim() if sum(size > 1 for size in tensor.shape) > 1 else 0


def _is_mixed(name: str, weight: Weight, numel: int, data: list[Tensor], result: Tensor) -> bool:
    """Return whether a result of a matrix and data may be a matrix to multiply by, not an activation.

    An activation has the dimensions of a batch, from data at least as large as the weight. Integers pick rows
    of a table, or matrices of a stack.
    """
    if not weight.dims or name == "embedding":
        return False
    if result.dim() <= weight.dims:
        return True
    if all(not tensor.is_floating_point() and tensor.dtype != torch.bool for tensor in data):
        return weight.dims > 2
    return max(tensor.numel() for tensor in data) < numel


class Origins:
    """Weights and constants among the tensors, by storage. Views share a storage."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: dict[Any, Weight] = {}
        for name, parameter in model.named_parameters():
            for tensor in plain_tensors(parameter):
                self.weights[storage(tensor)] = Weight(name, WIDEST_FIRST[0], _matrix_dims(tensor))
        self.parameters = frozenset(self.weights)
        # Tensors made without parameters and without data. None: not made of buffers and attributes alone.
        self.constants: dict[Any, Weight | None] = {
            storage(tensor): Weight(name, WIDEST_FIRST[0], _matrix_dims(tensor))
            for name, fixed in _fixed_tensors(model)
            for tensor in plain_tensors(fixed)
            if storage(tensor) not in self.weights
        }

    def follow(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], written: list[Tensor], is_product: bool
    ) -> None:
        """Record the origin of an operator's outputs and of its arguments with in-place results."""
        inputs = [] if _NO_COPY.search(name) else inputs
        sources = [(storage(t), t) for t in inputs if t.dim()] or [(storage(t), t) for t in inputs]
        weights = [(self.weights[key], t.numel()) for key, t in sources if key in self.weights]
        constants = [(self.constants[key], t.numel()) for key, t in sources if key in self.constants]
        data = [t for key, t in sources if key not in self.weights and key not in self.constants]
        overwritten = {storage(tensor) for tensor in written}
        results = {storage(tensor): tensor for tensor in (*outputs, *written)}
        if not weights and not data:
            fixed = [(one, numel) for one, numel in constants if one]
            largest = max(fixed, key=_by_size)[0] if len(fixed) == len(constants) > 0 else None
            for key, tensor in results.items():
                made = largest and largest._replace(narrowest=narrower(largest.narrowest, format_of(tensor)))
                self.constants[key] = made
            return
        for key in overwritten:
            self.constants.pop(key, None)
        if not weights:
            return
        weight, numel = max(weights, key=_by_size)
        if any(each.narrowest == UNMEASURED for each, _ in weights):
            weight = weight._replace(narrowest=UNMEASURED)
        is_activation = is_product and (data or weight.narrowest == UNMEASURED)
        if is_product and not all(one for one, _ in constants):
            weight = weight._replace(dims=0)  # maybe a state: zeros at first, data later
        for key, tensor in results.items():
            made = weight._replace(narrowest=narrower(weight.narrowest, format_of(tensor)))
            if is_activation or (data and not _is_mixed(name, weight, numel, data, tensor)):
                if key in overwritten - self.parameters:
                    self.weights.pop(key, None)
            elif data or weight.narrowest == UNMEASURED:
                self.weights[key] = made._replace(narrowest=UNMEASURED)
            else:
                self.weights.setdefault(key, made)

    def is_fixed(self, key: Any) -> bool:
        """Return whether a tensor is a buffer or a weight, or is made of them alone."""
        weight = self.weights.get(key) or self.constants.get(key)
        return weight is not None and weight.narrowest != UNMEASURED


def _fixed_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers, and the tensors among the attributes of the modules, by name."""
    yield from model.named_buffers()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        yield f"{name}.{attribute}".lstrip("."), leaf


def _by_size(each: tuple[Weight, int]) -> tuple[bool, int]:
    return each[0].dims > 0, each[1]


def storage(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())


def plain_tensors(tensor: Any) -> list[Tensor]:
    """Return the inner tensors of a tensor, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return strided(tensor)
    names = tensor.__tensor_flatten__()[0]
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def strided(values: Any) -> list[Tensor]:
    """Return the tensors of a tree with sizes and a storage of their own: none sparse, none nested."""
    leaves = [values] if isinstance(values, Tensor) else tree_leaves(values)
    leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_nested]


def format_of(tensor: Tensor) -> str:
    """Return the format of a tensor's values. Integers limit nothing and count as the widest."""
    name = str(tensor.dtype).removeprefix("torch.")
    return next((each for each in WIDEST_FIRST if name.startswith(each)), WIDEST_FIRST[0])


def narrower(one: str, other: str) -> str:
    return max(one, other, key=WIDEST_FIRST.index)
