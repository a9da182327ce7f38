"""Batches in containers and objects of a user's own code."""

import collections
import dataclasses
import math
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from hpo.trial.own_batch import arrays_of, examples_of, map_leaves

X, Y = torch.randn(8, 4), torch.arange(8)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any = X
    y: Any = Y


@dataclasses.dataclass(slots=True)
class Slots:
    x: Any = X
    y: Any = Y


class Plain:
    def __init__(self) -> None:
        self.x, self.y, self.name, self.itself = X, Y, "rows", self


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Pair(NamedTuple):
    x: Any
    y: Any


class Rows(list[Any]):
    pass


class View(collections.abc.Mapping[str, Any]):
    def __init__(self) -> None:
        self._rows = {"x": X, "y": Y}

    def __getitem__(self, key: str) -> Any:
        return self._rows[key]

    def __iter__(self) -> Any:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


BATCHES = [
    *((X, Y), [X, Y], {"x": X, "y": Y}, Pair(X, Y), Frozen(), Slots(), Plain(), View(), Rows([X, Y])),
    *(Attributes(x=X, y=Y), types.SimpleNamespace(x=X, y=Y), types.MappingProxyType({"x": X, "y": Y})),
    *(collections.UserDict(x=X, y=Y), BatchEncoding({"x": X, "y": Y}), [Frozen(), {"again": Plain()}]),
]


def as_bf16(leaf: Any) -> Any:
    return leaf.bfloat16() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_tensors_change_in_a_copy_of_the_same_type(batch: Any) -> None:
    cast = map_leaves(as_bf16, batch)
    assert type(cast) is type(batch)
    changed = [one.dtype for one in arrays_of(cast) if one is not X and one.is_floating_point()]
    assert set(changed) == {torch.bfloat16}
    assert all(one is X or one is Y for one in arrays_of(batch))
    assert map_leaves(lambda leaf: leaf, batch) is batch
    assert examples_of(batch) == 8


def test_packed_sequence() -> None:
    packed = pack_sequence([X[:3], X[3:5]])
    cast = map_leaves(as_bf16, packed)
    assert (type(cast), cast.data.dtype) == (type(packed), torch.bfloat16)


@pytest.mark.parametrize("batch", [3, None, "rows", (X, X[:4]), torch.tensor(1.0), iter([X])])
def test_number_of_examples_is_unknown(batch: Any) -> None:
    assert math.isnan(examples_of(batch))


def test_numpy_arrays_count() -> None:
    assert examples_of({"x": np.zeros((8, 2)), "y": Y, "weight": np.float64(2.0)}) == 8
