"""The format of one product, measured by planted weights, and its floating-point operations.

Dtypes and flags are no proof. A flag or an environment variable makes a library round its fp32 inputs, and a
layer may compute in fp32 and cast its result back. So an operator on a weight is called again with the same
shapes and dtypes, inputs of 1, biases of 0 and the weights

    w_ij = s_ij (1.5 + 2^-k [s_ij > 0]),    s_ij = +-1,    sum_j s_ij = 0,

Their products sum to 2^-k times the number of positive signs, and to 0 without the term 2^-k. A format with
too few bits of fraction for 1.5 + 2^-k rounds it to 1.5, and the term does not change the result:

    format            bits of its fraction    k = 30    k = 12    k = 9    k = 5    k = 2
    float64           52                      kept      kept      kept     kept     kept
    float32           23                                kept      kept     kept     kept
    tf32, float16     10                                          kept     kept     kept
    bfloat16          7                                                    kept     kept
    float8            3 (e4m3), 2 (e5m2)                                            kept

tf32 has the exponent of float32: it keeps weights of 2^-30, but float16 rounds them to 0. Sums are exact in
fp32 in any order on any device, and emulated precisions round like native ones. Inputs of 1 hide the weights
of some operators, such as attention. These are called with their real inputs instead.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from hpo.memory import is_out_of_memory
from hpo.precision.amp import fp32_backends
from hpo.precision.origins import UNMEASURED, WIDEST_FIRST, format_of, strided
from hpo.random_numbers import manual_seed, same_random_numbers

KEPT_BY = {30: "float64", 12: "float32", 9: "tf32", 5: "bfloat16", 2: "float8"}
"""{k: the narrowest format that keeps a fraction of 2^-k}, the widest first."""
SMALL = 2.0**-30
"""A factor that moves the weights below the range of float16 but not of tf32."""

_PRODUCT = re.compile(
    r"m[mv](_|$)|matmul|(^|_)linear(_|$)|conv(?!ert)|rnn|att(entio)?n|(^|_)v?dot$|encoder_layer|^_trilinear"
)
"""PyTorch's products, such as `addmm` and `_scaled_mm`. `_convert_...` and `upsample_linear1d` are none."""
_WHOLE_LAYER = re.compile(r"rnn|encoder_layer|multi_head")
"""Operators with several matrices among their arguments."""
_TWO_FACTORS = re.compile(r"m[mv](_|$)|matmul|(^|_)linear(_|$)|dot$")
_HIDING = re.compile(r"encoder_layer|multi_head|^_trilinear")
"""PyTorch's operators with products in operators that they call."""


@dataclass(frozen=True)
class Call:
    """An operator and its arguments."""

    func: Any
    args: Any
    kwargs: Any

    @cached_property
    def name(self) -> str:
        return str(self.func.name().split("::")[-1].split(".")[0].rstrip("_"))

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @cached_property
    def inputs(self) -> list[Tensor]:
        return strided(self.tensors)

    @cached_property
    def is_known(self) -> bool:
        """True if the operator multiplies its own arguments."""
        return self.func.name().startswith("aten::") and not _HIDING.search(self.name)

    @cached_property
    def is_named_product(self) -> bool:
        return bool(_PRODUCT.search(self.name))

    @property
    def is_product(self) -> bool:
        """True for a product of PyTorch, and for any operator of another library."""
        return self.is_named_product or not self.is_known

    @property
    def has_numbers(self) -> bool:
        return all(tensor.numel() for tensor in self.factors)

    @cached_property
    def calls_others(self) -> bool:
        """True if the operator may call products: composite operators, and those of other libraries."""
        if not isinstance(self.func, torch._ops.OpOverload) or not self.tensors:
            return False
        return _is_composite(self.func) or not self.is_known or self.has_nested

    @cached_property
    def has_nested(self) -> bool:
        return any(tensor.is_nested for tensor in self.tensors)

    @cached_property
    def written(self) -> list[Tensor]:
        """The arguments with in-place results."""
        if not (names := _written_arguments(self.func)):
            return []
        positions = zip((argument.name for argument in self.func._schema.arguments), self.args, strict=False)
        return strided([value for name, value in (*positions, *self.kwargs.items()) if name in names])

    def key(self, weight: Tensor) -> Any:
        """Return a key, equal for two calls of one kernel."""
        leaves = tree_leaves((self.args, self.kwargs))
        tensors = ((t.shape, t.stride(), t.dtype, t is weight) for t in leaves if isinstance(t, Tensor))
        others = (repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        switches = (switch.fp32_precision for each in fp32_backends().values() for switch in each)
        return self.func, *tensors, *others, *switches

    @cached_property
    def factors(self) -> list[Tensor]:
        """The tensors to multiply; all matrices of an unknown operator."""
        args, least = self.args, 1
        if not self.is_known or _WHOLE_LAYER.search(self.name) or "backward" in self.name:
            least = 2
        elif self.bias_at is None:
            args = args[:3]
        else:
            args = args[:2] if self.bias_at else args[1:3]
        return [tensor for tensor in strided(args) if tensor.dim() >= least]

    @property
    def bias_at(self) -> int | None:
        return 0 if re.search("add[bm]", self.name) else 2 if re.search("conv|^linear$", self.name) else None

    @cached_property
    def declared(self) -> str:
        """The narrowest format of the first two factors, by their dtypes."""
        formats = [format_of(tensor) for tensor in self.factors[:2] if tensor.is_floating_point()]
        return max(formats, key=WIDEST_FIRST.index, default=UNMEASURED)

    @property
    def is_outer(self) -> bool:
        """True for an outer product, which adds nothing up, as of positions and rotary frequencies."""
        return bool(_TWO_FACTORS.search(self.name)) and self.factors[0].shape[-1] == 1

    def flops(self, result: Any) -> int:
        """Return the floating-point operations, by PyTorch's formulas where there is one."""
        name = self.name.replace("_for_cpu", "")
        formula = flop_registry.get(getattr(torch.ops.aten, name, self.func))
        if formula is not None:
            return int(formula(*self.args, **self.kwargs, out_val=result))
        if _TWO_FACTORS.search(name):
            return 2 * strided(result)[0].numel() * self.factors[0].shape[-1]
        data, *weights = self.factors
        passes = 4 if "backward" in name else 2
        return passes * (data.numel() // data.shape[-1]) * sum(weight.numel() for weight in weights)

    def measure(self, weight: Tensor, data: list[Tensor]) -> str:
        """Return the format of the product with `weight`. The random number generators stay as they are.

        Of a backward pass, only products of two factors are measured, and of others the dtype counts.
        """
        if not self.is_known or not weight.is_floating_point():
            return UNMEASURED
        if "backward" in self.name:
            return self.declared
        try:
            with same_random_numbers():
                return self._measured_on_ones(weight, data)
        except Exception as error:  # an operator may refuse these weights
            if is_out_of_memory(error):
                raise
            return UNMEASURED

    def _measured_on_ones(self, weight: Tensor, data: list[Tensor]) -> str:
        # In the call of a whole layer, the other matrices must stay as they are.
        others = data if _WHOLE_LAYER.search(self.name) else self.factors
        ones = {id(tensor): torch.ones_like(tensor) for tensor in others if tensor is not weight}
        if self.bias_at is not None:
            biases = strided(self.args[self.bias_at : self.bias_at + 1])
            ones |= {id(bias): torch.zeros_like(bias) for bias in biases}
        kind = self._measured(weight, ones)
        return self._measured(weight, {}) if kind == UNMEASURED else kind

    def _measured(self, weight: Tensor, replaced: dict[int, Tensor]) -> str:
        """Return the format. `replaced` are the other changed arguments: {id: new tensor}."""
        args, bases = self.args, dict[float, Tensor | None]()
        written = {id(tensor): tensor for tensor in self.written}
        if self.name == "_cudnn_rnn":
            args = (*args[:3], None, *args[4:])  # without its joint copy of all weights

        def result(k: int | None, scale: float) -> Tensor | None:
            copies = {key: tensor.clone() for key, tensor in written.items()}
            changed = {**copies, **replaced, id(weight): planted(weight, k, scale)}
            given = tree_map(lambda leaf: changed.get(id(leaf), leaf), (args, self.kwargs))
            manual_seed(0)  # the same dropout every time
            outputs = [t for t in strided(self.func(*given[0], **given[1])) if t.is_floating_point()]
            return outputs[0] if outputs and bool(outputs[0].isfinite().all()) else None

        def is_kept(k: int | None, scale: float = 1.0) -> bool:
            """Return whether a term of 2^-k changes the result. Both results must be finite."""
            if scale not in bases:
                bases[scale] = result(None, scale)
            base, changed = bases[scale], result(k, scale)
            return base is not None and changed is not None and not torch.equal(changed, base)

        if not replaced and is_kept(None):  # sums that are not exact may differ from call to call
            return UNMEASURED
        terms = ((k, name) for k, name in KEPT_BY.items() if 2.0**-k >= torch.finfo(weight.dtype).eps)
        narrowest = next((name for k, name in terms if is_kept(k)), UNMEASURED)
        return "float16" if narrowest == "tf32" and not is_kept(2, SMALL) else narrowest


@cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


@cache
def _written_arguments(func: Any) -> frozenset[str]:
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return frozenset(one.name for one in arguments if one.alias_info and one.alias_info.is_write)


def planted(weight: Tensor, k: int | None, scale: float) -> Tensor:
    """Return the weights of the module's docstring.

    Two slices of opposite signs are 1.75 for each k, so a scale by the largest value stays.
    """
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    signs = [_signs(size).to(weight.device, dtype) for size in weight.shape]
    longest = max(range(len(signs)), key=lambda dim: len(signs[dim]))
    size = torch.full_like(signs[longest], 1.5)
    changes = torch.ones_like(size)
    for sign in (1, -1) if len(size) > 2 else ():
        at = int((signs[longest] == sign).nonzero()[0])
        size[at], changes[at] = 1.75, 0
    along = [-1 if dim == longest else 1 for dim in range(weight.dim())]
    size, changes = size.reshape(along), changes.reshape(along)
    product = math.prod(torch.meshgrid(signs, indexing="ij"))
    values = product * size
    if k is not None:
        values = values + changes * (product > 0) * 2.0**-k
    return torch.empty_like(weight).copy_(values * scale)


def _signs(size: int) -> Tensor:
    """Return equally many 1 and -1 (one more 1 for an odd size) in an order without a period."""
    signs = torch.ones(size)
    signs[1::2] = -1
    return signs[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
