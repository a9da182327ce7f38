"""Sums of many terms in fp32 on a CPU, where PyTorch makes them in bf16 or fp16.

A sum of equal terms in bf16 stops at 256 of them, because 257 has nine bits; in fp16 it stops at 2,048.
PyTorch's kernels sum in fp32, but for these on a CPU (torch 2.13.0): the gradients of a layer norm's weight
and bias, also of fp32 weights under autocast (each thread has its own sum), and the gradients of rows that
many tokens look up (`embedding`, `p[ids]`, `take`, and `index_select` along most dimensions). Over some
thousand tokens such a gradient is up to 80 % too small. Nothing shows it, because the loss is right.

`float32_sums` gives these kernels fp32 copies of inputs in bf16 and fp16, and rounds their result once. It
replaces operators, not modules, so it also reaches a model's own code. PyTorch's kernels still compute all
other inputs.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hpo.precision.parts import REDUCED, to_float32
from hpo.precision.table import Precision

_Kernel = Callable[..., Any]

_CHUNK = 2**18
"""Values of a layer norm's input in one chunk, so that fp32 copies fit into the cache of a CPU."""
PLAIN_SUMS = (
    "On a CPU, PyTorch alone sums them in the format of the terms: a sum of ones in bf16 stops at 256."
)
_active: list[str] = []
"""The replaced operators."""
summed: set[str] = set()
"""Operators with sums that the last block made in fp32 and PyTorch alone would not."""


@contextlib.contextmanager
def float32_sums(precision: Precision) -> Iterator[None]:
    """Make the sums of the module's docstring in fp32 in this process, if `precision` has bf16 or fp16."""
    if precision.linear_dtype == "float32" or _active:
        yield
        return
    summed.clear()
    with torch.library._scoped_library("aten", "IMPL") as library:
        try:
            for name, replace in _REPLACED.items():
                kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
                with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
                    library.impl(name, replace(kernel), "CPU", with_keyset=True)
                _active.append(name)
            yield
        finally:
            _active.clear()


def _layer_norm(kernel: _Kernel) -> _Kernel:
    """Replace `native_layer_norm_backward`: sums over rows are the gradients of the weight and the bias."""

    def backward(keys: Any, grad: Any, values: Any, shape: Any, *rest: Any) -> Any:
        mean, rstd, weight, bias, needed = rest
        if values.dtype not in REDUCED or not any(needed[1:]):
            return kernel(keys, grad, values, shape, *rest)
        summed.add("layer_norm")
        in_values = kernel(keys, grad, values, shape, *rest[:-1], [needed[0], False, False])[0]
        size, given = math.prod(shape), (weight, bias)
        flat = [None if one is None else one.float().reshape(-1) for one in given]
        rows = (one.reshape(mean.numel(), -1) for one in (grad, values, mean, rstd))
        sums = [None if one is None else torch.zeros(size) for one in given]
        for chunk in zip(*(one.split(max(1, _CHUNK // size)) for one in rows), strict=True):
            grad, values, mean, rstd = map(to_float32, chunk)
            parts = kernel(keys, grad, values, [size], mean, rstd, *flat, [False, *needed[1:]])[1:]
            for total, part in zip(sums, parts, strict=True):
                if total is not None and part is not None:
                    total += part
        pairs = zip(sums, given, needed[1:], strict=True)
        return in_values, *(
            one.reshape(shape).to(of) if use and one is not None else None for one, of, use in pairs
        )

    return backward


def _of_rows(
    kernel: _Kernel, name: str, in_place: bool = False, sums: Callable[..., bool] = lambda *_: True
) -> _Kernel:
    """Replace an operator that adds rows, to its first argument if it works `in_place`."""

    def add(keys: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if first.dtype not in REDUCED or not sums(*args):
            return kernel(keys, *args, **kwargs)
        summed.add(name)
        copies = tree_map(to_float32, args)
        result = kernel(keys, *copies, **kwargs)
        return first.copy_(result) if in_place else result.to(first.dtype)

    return add


def _accumulates(_into: Any, _indices: Any, _values: Any, accumulate: bool = False, *_: Any) -> bool:
    return accumulate


def _is_slow(into: Tensor, dim: int, *_: Any) -> bool:
    """Return whether `index_add` has no kernel of its own along this dimension."""
    return into.dim() < 2 or dim % into.dim() != 0


_REPLACED: dict[str, Callable[[_Kernel], _Kernel]] = {
    "native_layer_norm_backward": _layer_norm,
    "embedding_dense_backward": partial(_of_rows, name="embedding"),
    "_embedding_bag_dense_backward": partial(_of_rows, name="embedding_bag"),
    "_index_put_impl_": partial(_of_rows, name="indexing", in_place=True, sums=_accumulates),
    "put_": partial(_of_rows, name="take", in_place=True, sums=_accumulates),
    "index_add": partial(_of_rows, name="index_add", sums=_is_slow),
    "index_add_": partial(_of_rows, name="index_add", in_place=True, sums=_is_slow),
}
