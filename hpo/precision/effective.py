"""The precision of a model's products, measured at the operators that multiply by its weights.

Dtypes and flags are no proof. A flag or an environment variable makes a library round its fp32 inputs, and a
layer may compute in fp32 and cast its result back. So this module observes a pass operator by operator.
Weights are parameters and tensors made of them, such as casts, views and decoded matrices
(`hpo.precision.origins`). Each operator on a weight is called again with the same shapes and dtypes, inputs
of 1, biases of 0 and the weights

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

If a weight is cast to a narrower dtype and back, the narrower one counts. Storage does not count: a matrix
stored in int8 is decoded and multiplied in fp32 or bf16. The compiler hides the operators, so
`hpo.precision.compiled` measures a compiled model. The model and the random number generators are restored.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hpo.errors import first_names
from hpo.memory import is_out_of_memory
from hpo.precision.amp import MixedPrecision, fp32_backends, reduced_precision_reduction, tf32_is_on
from hpo.precision.float8 import float8_facts, float8_weights, no_float8
from hpo.precision.origins import UNMEASURED, Origins, narrower, storage, strided
from hpo.precision.parts import InFloat32, float32_weights
from hpo.precision.table import Precision
from hpo.random_numbers import manual_seed

KEPT_BY = {30: "float64", 12: "float32", 9: "tf32", 5: "bfloat16", 2: "float8"}
"""{k: the narrowest format that keeps a fraction of 2^-k}, the widest first."""
COMPILED = "the code of the model compiles it, and only the uncompiled model was measured."
UNVERIFIED = "the precision of the products is unverified"
SMALL = 2.0**-30
"""A factor that moves the weights below the range of float16 but not of tf32."""

_PRODUCT = re.compile(r"m[mv](_|$)|matmul|linear|conv|rnn|attention|encoder_layer")
"""PyTorch's matrix products, such as `addmm` and `_scaled_mm`."""
_WHOLE_LAYER = re.compile(r"rnn|encoder_layer|multi_head")
"""Operators with several matrices among their arguments."""


class Agreement(NamedTuple):
    """Answer to the question: does a model compute in its precision?"""

    agrees: bool | None
    """None: unverified."""
    reason: str = ""
    """Reason for a disagreement or a missing verification."""


@dataclass
class Observation:
    """The formats of a model's products with its weights, in training and in evaluation mode."""

    products: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """{name of a weight: formats of its products}; UNMEASURED stands for a product without a measurement."""
    float8: dict[str, Any] = field(default_factory=dict)
    """The `float8_facts` of the model."""
    float8_weights: frozenset[str] = frozenset()
    float32_weights: frozenset[str] = frozenset()
    """Weights of the parts in fp32."""
    shared_weights: set[str] = field(default_factory=set)
    """Weights of the rest of the model with fp32 products inside these parts, such as relative positions.

    `products` has only their other products.
    """
    compiled: Agreement | None = None
    """The agreement of the compiled model; None: the model is eager."""

    def telemetry(self) -> dict[str, Any]:
        return {
            "linear_products": dict(Counter("/".join(sorted(each)) for each in self.products.values())),
            "tf32": tf32_is_on(),
            "reduced_precision_reduction": reduced_precision_reduction(),
            "compiled": self.compiled is not None,
            **self.float8,
        }

    def expected(self, name: str, precision: Precision) -> str:
        """Return the format of a weight's products under `precision`. Under fp8, most layers may be bf16."""
        if precision.autocast and name in self.float32_weights:
            return "float32"
        is_wider = precision.float8 and name not in self.float8_weights
        return precision.linear_dtype if is_wider else precision.products

    def agreement(self, precision: Precision) -> Agreement:
        """Compare the products with `precision`. A GPU may run small products without TF32."""
        others = {}
        for name, formats in self.products.items():
            allowed = {self.expected(name, precision), UNMEASURED, *(["float32"] if precision.tf32 else [])}
            if wrong := formats - allowed:
                others[name] = f"{name} ({'/'.join(sorted(wrong))})"
        num_weights = len(self.products)
        if others:
            return Agreement(
                False,
                f"{len(others)} of {num_weights} weights were not multiplied in {precision.products}"
                f"{', or in float32 inside fp32_parts' if self.float32_weights else ''}: "
                f"{some(others.values())}.",
            )
        if precision.float8 and (why := no_float8(self.float8)):
            return Agreement(False, why)
        if precision.tf32 != tf32_is_on() and precision.autocast is None:
            return Agreement(False, f"TF32 is {'on' if tf32_is_on() else 'off'}.")
        if self.compiled is not None:
            return self.compiled
        unmeasured = [name for name, formats in self.products.items() if UNMEASURED in formats]
        if unmeasured:
            counts = f"{len(unmeasured)} of {num_weights} weights"
            return Agreement(None, f"The products of {counts} could not be measured: {some(unmeasured)}.")
        if not num_weights:
            return Agreement(None, NO_PRODUCT.capitalize())
        if precision.tf32 and not any("tf32" in formats for formats in self.products.values()):
            return Agreement(None, TF32_UNSEEN)
        return Agreement(True)


NO_PRODUCT = "no product with a weight was seen."
TF32_UNSEEN = "TF32 is on, but no product was seen to use it. A GPU may run small products without it."


def some(names: Iterable[str]) -> str:
    """Return the first three names and the number of the others."""
    return first_names([*names], 3)


def observe_model(
    model: nn.Module, mixed_precision: MixedPrecision, call: Callable[[Any], object]
) -> Observation:
    """Measure the products while `call` calls the eager model in training and in evaluation mode."""
    with restored(model), observe(model) as seen:
        with mixed_precision.autocast():
            call(model.train())
        with mixed_precision.evaluation():
            call(model.eval())
    return seen


@contextlib.contextmanager
def observe(model: nn.Module) -> Iterator[Observation]:
    """Measure every product with a weight of `model` inside the block."""
    seen = Observation(
        float8=float8_facts(model),
        float8_weights=frozenset(float8_weights(model)),
        float32_weights=float32_weights(model),
        compiled=Agreement(None, COMPILED) if compiled_modules(model) else None,
    )
    # The operators of parts compiled by the model itself are visible only if these run eagerly.
    with torch.compiler.set_stance("force_eager"), contextlib.ExitStack() as hooks:
        products = _Products(model, seen)
        for module in model.modules():
            if isinstance(module, InFloat32):
                hooks.enter_context(module.register_forward_pre_hook(products.enter_part))
                hooks.enter_context(module.register_forward_hook(products.leave_part, always_call=True))
        with products:
            yield seen


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of compiled modules. "" is the model itself."""
    return [
        name
        for name, module in model.named_modules()
        if module._compiled_call_impl is not None
        or "_orig_mod" in module._modules  # a wrapper of `torch.compile`
    ]


class _Products(TorchDispatchMode):
    """Follows the weights from operator to operator, and measures their products."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, seen: Observation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen
        self.known: dict[Any, str] = {}
        self.origins = Origins(model)
        self.num_parts = 0  # calls of parts in fp32 that have not returned

    def enter_part(self, *_: object) -> None:
        self.num_parts += 1

    def leave_part(self, *_: object) -> None:
        self.num_parts -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if set(types) - {Tensor, nn.Parameter}:
            return NotImplemented  # a tensor made of others: its inner operators are dispatched next
        name = func.name().split("::")[-1].split(".")[0].rstrip("_")
        call = _Call(func, name, args, kwargs or {})
        is_product = bool(_PRODUCT.search(name) or not call.is_known) and self._note(call)
        result = func(*args, **(kwargs or {}))
        self.origins.follow(name, strided((args, kwargs)), strided(result), call.written(), is_product)
        return result

    def _note(self, call: _Call) -> bool:
        """Measure the call if it is a product with a weight. Return whether it is a product."""
        factors = call.factors()
        keys = {storage(t): t for t in factors if t.is_floating_point()}
        data = [t for key, t in keys.items() if not self.origins.is_fixed(key)]
        # Weights alone make another weight, as for a spectral norm; but two matrices are also multiplied.
        is_product = data or (call.is_known and all(tensor.dim() > 1 for tensor in factors))
        if not is_product or not all(tensor.numel() for tensor in factors):
            return bool(is_product)
        for tensor in factors:
            if weight := self.origins.weights.get(storage(tensor)):
                key = call.key(tensor)
                if weight.narrowest != UNMEASURED and key not in self.known:
                    self.known[key] = call.measure(tensor, data)
                measured = narrower(weight.narrowest, self.known.get(key, UNMEASURED))
                is_rest = weight.name not in self.seen.float32_weights
                if self.num_parts and is_rest and measured == "float32":
                    self.seen.shared_weights.add(weight.name)
                else:
                    self.seen.products[weight.name].add(measured)
        return True


@dataclass(frozen=True)
class _Call:
    """An operator and its arguments."""

    func: Any
    name: str
    args: Any
    kwargs: Any

    @property
    def is_known(self) -> bool:
        """True if the operator multiplies its own arguments.

        Autocast reaches the products inside other operators, but not under observation.
        """
        return self.func.name().startswith("aten::") and self.name != "_trilinear"

    def written(self) -> list[Tensor]:
        """Return the arguments with in-place results."""
        if not (schema := getattr(self.func, "_schema", None)):
            return []
        named = {argument.name: argument for argument in schema.arguments}
        given = [*zip(named, self.args, strict=False), *self.kwargs.items()]
        return strided([value for name, value in given if (of := named[name].alias_info) and of.is_write])

    def key(self, weight: Tensor) -> Any:
        """Return a key, equal for two calls of one kernel."""
        leaves = tree_leaves((self.args, self.kwargs))
        tensors = ((t.shape, t.stride(), t.dtype, t is weight) for t in leaves if isinstance(t, Tensor))
        others = (repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        switches = (switch.fp32_precision for each in fp32_backends().values() for switch in each)
        return self.func, *tensors, *others, *switches

    def factors(self) -> list[Tensor]:
        """Return the tensors to multiply; all matrices of an unknown operator."""
        args, least = self.args, 1
        if not self.is_known or _WHOLE_LAYER.search(self.name):
            least = 2
        elif self.bias_at is None:
            args = args[:3]
        else:
            args = args[:2] if self.bias_at else args[1:3]
        return [tensor for tensor in strided(args) if tensor.dim() >= least]

    @property
    def bias_at(self) -> int | None:
        return 0 if re.search("add[bm]", self.name) else 2 if re.search("conv|^linear$", self.name) else None

    def measure(self, weight: Tensor, data: list[Tensor]) -> str:
        """Return the format of the product with `weight`."""
        if not self.is_known or not weight.is_floating_point():
            return UNMEASURED
        try:
            # In the call of a whole layer, the other matrices must stay as they are.
            others = data if _WHOLE_LAYER.search(self.name) else self.factors()
            ones = {id(tensor): torch.ones_like(tensor) for tensor in others if tensor is not weight}
            if self.bias_at is not None:
                biases = strided(self.args[self.bias_at : self.bias_at + 1])
                ones |= {id(bias): torch.zeros_like(bias) for bias in biases}
            kind = self._measured(weight, ones)
            return self._measured(weight, {}) if kind == UNMEASURED else kind
        except Exception as error:  # an operator may refuse these weights
            if is_out_of_memory(error):
                raise
            return UNMEASURED

    def _measured(self, weight: Tensor, replaced: dict[int, Tensor]) -> str:
        """Return the format. `replaced` are the other changed arguments: {id: new tensor}."""
        args, bases = self.args, dict[float, Tensor | None]()
        if self.name == "_cudnn_rnn":
            args = (*args[:3], None, *args[4:])  # without its joint copy of all weights

        def result(k: int | None, scale: float) -> Tensor | None:
            changed = {**replaced, id(weight): _planted(weight, k, scale)}
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


def _planted(weight: Tensor, k: int | None, scale: float) -> Tensor:
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


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the model's mode and buffers and the random number generators after the block."""
    modules = [*model.modules()]
    modes = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    values = [{name: each.clone() for name, each in of.items() if each is not None} for of in buffers]
    gpus = {each.device.index or 0 for each in model.parameters() if each.device.type == "cuda"}
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        with torch.no_grad():
            for module, mode, of, before in zip(modules, modes, buffers, values, strict=True):
                module.training = mode
                for name, buffer in of.items():
                    if buffer is not None:
                        buffer.copy_(before[name])
                    module._buffers[name] = buffer
