"""Tensors in a batch of a user's own code, which may be in any container or object.

Containers are PyTorch's pytrees, other subclasses of tuple, list and dict, read-only mappings, and objects
with attributes, such as dataclasses and namespaces. An object is copied where a tensor in it changes.
"""

import copy
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_LEAVES = (Tensor, np.ndarray, str, bytes, int, float, type, nn.Module, FunctionType)


def arrays_of(batch: Any) -> list[Any]:
    """Return the tensors and NumPy arrays in a batch, in order."""
    leaves: Any = []
    map_leaves(lambda leaf: leaves.append(leaf) or leaf, batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]


def examples_of(batch: Any) -> float:
    """Return the one length of all tensors and arrays, NaN if there is none or several."""
    lengths = {len(one) for one in arrays_of(batch) if one.ndim and not getattr(one, "is_nested", False)}
    return lengths.pop() if len(lengths) == 1 else float("nan")


def map_leaves(function: Callable[[Any], Any], batch: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a batch with `function` of its leaves. What does not change is not copied."""
    if isinstance(batch, _LEAVES) or batch is None:
        return function(batch)
    known = {} if known is None else known
    if id(batch) not in known:
        known[id(batch)] = batch  # for an object inside itself
        members, make = _opened(batch)
        changed = {key: map_leaves(function, one, known) for key, one in members.items()}
        if any(changed[key] is not one for key, one in members.items()):
            known[id(batch)] = make(changed)
    return known[id(batch)]


def _opened(batch: Any) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], Any]]:
    """Return the members of a container or object, and a function that makes it of others."""
    children, spec = tree_flatten(batch, lambda one: one is not batch)
    if len(children) != 1 or children[0] is not batch:
        return dict(enumerate(children)), lambda members: tree_unflatten(members.values(), spec)
    kind = type(batch)
    if isinstance(batch, tuple):  # such as `PackedSequence`
        return dict(enumerate(batch)), lambda members: kind(*members.values())
    if isinstance(batch, MappingProxyType):
        return {**batch}, MappingProxyType
    if isinstance(batch, dict | list):
        members = batch if isinstance(batch, dict) else dict(enumerate(batch))
        return {**members}, lambda members: _copied(batch, members, kind.__setitem__)
    slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
    names = [*getattr(batch, "__dict__", ()), *(name for name in slots if hasattr(batch, name))]
    attributes = {name: getattr(batch, name) for name in names}
    return attributes, lambda members: _copied(batch, members, object.__setattr__)


def _copied(one: Any, members: Mapping[Any, Any], put: Callable[[Any, Any, Any], None]) -> Any:
    made = copy.copy(one)
    for key, value in members.items():
        put(made, key, value)
    return made
