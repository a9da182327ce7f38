"""Which precision a model really computes in: measured, by products whose exact result is known.

Dtypes and flags do not tell. A flag or an environment variable makes a library round what comes as fp32; a
layer may compute in fp32 and cast its result back; a module may do so in training alone. So every module with
a weight matrix is called once more at its place in the model, as it was called but with inputs of 1, biases
of 0 and the weights

    w_ij = s_ij (1.5 + 2^-k [s_ij > 0]),    s_ij = +-1,    sum_j s_ij = 0,

whose products sum to 2^-k times the number of positive signs, and to 0 without the term 2^-k. A format whose
fraction has too few bits for 1.5 + 2^-k rounds it to 1.5, so whether the term changes the result tells it:

    format            bits of its fraction    k = 12    k = 9    k = 5    k = 2
    float32           23                      kept      kept     kept     kept
    tf32, float16     10                                kept     kept     kept
    bfloat16          7                                          kept     kept
    float8            3 (e4m3), 2 (e5m2)                                  kept

tf32 has the exponent of float32: it keeps weights of 2^-30, which float16 takes for 0. Everything is exact in
fp32 in any order of summation, on any device, and emulated precisions round as native ones do. Where the
weights themselves are bf16, products of bf16 are all that there can be.

The compiler hides the modules: see `hpo.precision.compiled` for what is measured after it.

The model comes back as it was: its weights are not written to, its mode, buffers and the random number
generators are restored.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hpo.memory import is_out_of_memory
from hpo.precision.amp import (
    MixedPrecision,
    fp32_backends,
    is_matmul_module,
    reduced_precision_reduction,
    tf32_is_on,
)
from hpo.precision.float8 import float8_facts, no_float8
from hpo.precision.frozen import FrozenLinear
from hpo.precision.table import Precision
from hpo.random_numbers import manual_seed

KEPT_BY = {12: "float32", 9: "tf32", 5: "bfloat16", 2: "float8"}
"""{k: the narrowest format that keeps a fraction of 2^-k}, the widest first."""
NO_PRODUCT = ""
SMALL = 2.0**-30
"""Times this, the weights lie below the range of float16 and inside that of tf32."""


@dataclass(frozen=True)
class Fact:
    """What one call of a module showed."""

    dtype: str
    """Of its output."""
    product: str | None
    """The format of its products, measured; None where they could not be measured."""

    def __str__(self) -> str:
        """`float32`, or `float32, output bfloat16`."""
        return self.dtype if self.product in (None, self.dtype) else f"{self.product}, output {self.dtype}"


@dataclass
class Observation:
    """What was really seen at the modules with weight matrices, in training and in evaluation mode."""

    facts: dict[str, set[Fact]] = field(default_factory=lambda: defaultdict(set))
    """By the module's name; of those that were called with numbers: a table that is looked up is none."""
    float8: dict[str, Any] = field(default_factory=dict)
    """What `float8_facts` says of the model."""
    compiled: str = ""
    """What the compiled model computes in other than the precision; empty where it agrees, or is eager."""

    def telemetry(self, *, compiled: bool) -> dict[str, Any]:
        facts = self.facts.values()
        return {
            "linear_dtypes": dict(Counter(_joined({fact.dtype for fact in each}) for each in facts)),
            "linear_products": dict(
                Counter(_joined({fact.product or "unmeasured" for fact in each}) for each in facts)
            ),
            "tf32": tf32_is_on(),
            "reduced_precision_reduction": reduced_precision_reduction(),
            "compiled": compiled,
            **self.float8,
        }

    def disagreement(self, precision: Precision) -> str:
        """Why what was seen is not `precision`; empty when it is."""
        others = {
            name: wrong
            for name, facts in self.facts.items()
            if (wrong := {fact for fact in facts if not _agrees(fact, precision)})
        }
        if others:
            some = [f"{name} ({_joined(map(str, wrong))})" for name, wrong in others.items()]
            more = ", ..." if len(some) > 3 else ""
            return (
                f"{len(others)} of {len(self.facts)} linear layers did not compute in {precision.products}: "
                f"{', '.join(some[:3])}{more}."
            )
        if self.compiled:
            return self.compiled
        if precision.float8 and (why := no_float8(self.float8)):
            return why
        if precision.tf32 != tf32_is_on() and precision.autocast is None:
            return f"TF32 is {'on' if tf32_is_on() else 'off'}."
        return ""


def _agrees(fact: Fact, precision: Precision) -> bool:
    """Whether the products are the precision's; the output may have a wider dtype than they, but no narrower.

    Under fp8 the layers that are not converted are bf16. On a GPU, products of few rows may run without TF32.
    """
    allowed = {precision.products}
    if precision.float8:
        allowed.add(precision.linear_dtype)
    elif precision.tf32:
        allowed.add("float32")
    if fact.product is None:
        return fact.dtype == precision.linear_dtype
    is_narrowed = _bits(fact.dtype) < _bits(precision.linear_dtype)
    return fact.product in allowed and not is_narrowed


def _bits(dtype: str) -> int:
    return torch.finfo(getattr(torch, dtype)).bits


def _joined(names: Iterable[str]) -> str:
    return "/".join(sorted(names))


def observe_model(
    model: nn.Module, mixed_precision: MixedPrecision, call: Callable[[Any], object]
) -> Observation:
    """Have `call` call the model, not compiled, in training and in evaluation mode, and measure what it
    computes in."""
    with left_as_it_was(model), observe(model) as seen:
        with mixed_precision.autocast():
            call(model.train())
        with mixed_precision.evaluation():
            call(model.eval())
    return seen


@contextlib.contextmanager
def observe(model: nn.Module) -> Iterator[Observation]:
    """Record and measure every module with a weight matrix that is called inside the block."""
    seen = Observation(float8=float8_facts(model))
    known: dict[Any, str | None] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs, result = first_float((args, kwargs)), first_float(output)
        if inputs is None or result is None:
            return
        key = _kind_of_call(name, module, inputs, result)
        if key not in known:
            known[key] = measure_products(module, args, kwargs)
        if known[key] != NO_PRODUCT:
            dtype = str(result.dtype).removeprefix("torch.")
            seen.facts[name].add(Fact(dtype, known[key]))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if is_matmul_module(module):
                hook = partial(note, name)
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield seen


def measure_products(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """The format in which `module` multiplies its weights when it is called so, here and now.

    `float32`, `tf32`, `float16`, `bfloat16` or `float8`; NO_PRODUCT where its matrices are only added; None
    where its result does not depend on them so that it could be told.
    """
    first = first_float((args, kwargs))
    if first is None:
        return None
    weights = dict(module._parameters)
    # What is stored in fewer bits is decoded: the products are measured, not the storage.
    decoded = weights | ({"stored": module.weight} if isinstance(module, FrozenLinear) else {})

    def result(k: int | None, scale: float, inputs: Tensor) -> Tensor | None:
        for name, parameter in decoded.items():
            if parameter is not None:
                module._parameters[name] = _planted(parameter, k, scale)
        given = tree_map(lambda leaf: inputs if leaf is first else leaf, (args, kwargs))
        manual_seed(0)  # the same dropout every time
        output = first_float(module.forward(*given[0], **given[1]))
        return None if output is None or not bool(output.isfinite().all()) else output.detach()

    def is_kept(k: int, scale: float = 1.0, value: float = 1.0) -> bool:
        """Whether a term of 2^-k changes the result; False too where a result is not finite."""
        inputs = torch.full_like(first, value)
        if (scale, value) not in bases:
            bases[scale, value] = result(None, scale, inputs)
        base, changed = bases[scale, value], result(k, scale, inputs)
        return base is not None and changed is not None and not torch.equal(changed, base)

    bases: dict[tuple[float, float], Tensor | None] = {}
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with _same_random_numbers([first]):
            if not _is_plain(module) and is_kept(2, value=0.0):
                return NO_PRODUCT
            narrowest = next((name for k, name in KEPT_BY.items() if is_kept(k)), None)
            return "float16" if narrowest == "tf32" and not is_kept(2, SMALL) else narrowest
    except Exception as error:
        # A module that refuses what it was not made for is only not measured; its dtype is known.
        if is_out_of_memory(error):
            raise
        return None
    finally:
        module._parameters.update(weights)
        torch.set_autocast_cache_enabled(caches)


def _planted(parameter: Tensor, k: int | None, scale: float) -> nn.Parameter:
    """Weights as the head of this file has them; zeros for a bias.

    Two slices of opposite signs are 1.75 whatever k is, so that a scale that follows the largest value stays.
    """
    if parameter.dim() < 2 or not parameter.is_floating_point():
        return nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
    signs = [_signs(size).to(parameter.device) for size in parameter.shape]
    longest = max(range(len(signs)), key=lambda dim: len(signs[dim]))
    size = torch.full_like(signs[longest], 1.5)
    changes = torch.ones_like(size)
    for sign in (1, -1) if len(size) > 2 else ():
        at = int((signs[longest] == sign).nonzero()[0])
        size[at], changes[at] = 1.75, 0
    along = [-1 if dim == longest else 1 for dim in range(parameter.dim())]
    size, changes = size.reshape(along), changes.reshape(along)
    product = math.prod(torch.meshgrid(signs, indexing="ij"))
    values = product * size
    if k is not None:
        values = values + changes * (product > 0) * 2.0**-k
    return nn.Parameter((values * scale).to(parameter.dtype), requires_grad=False)


def _signs(size: int) -> Tensor:
    """As many 1 as -1 (one more where the size is odd), in an order of no period."""
    signs = torch.ones(size)
    signs[1::2] = -1
    return signs[torch.randperm(size, generator=torch.Generator().manual_seed(size))]


def _is_plain(module: nn.Module) -> bool:
    """Whether the module is one of PyTorch's, unchanged, or as one."""
    if isinstance(module, FrozenLinear):
        return True
    return type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)


def _kind_of_call(name: str, module: nn.Module, inputs: Tensor, output: Tensor) -> Any:
    """Equal for calls that compute alike: of PyTorch's modules in one state of autocast and flags."""
    device_type = inputs.device.type
    return (
        type(module) if _is_plain(module) else name,
        tuple((weight.shape, weight.dtype) for weight in module.parameters(recurse=False)),
        (inputs.shape, inputs.dtype, output.dtype),
        (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)),
        (module.training, torch.is_grad_enabled()),
        tuple(switch.fp32_precision for switches in fp32_backends().values() for switch in switches),
    )


def first_float(values: Any) -> Tensor | None:
    """The first floating-point tensor among the leaves of `values`, such as what a module returned."""
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return next((leaf for leaf in leaves if leaf.is_floating_point()), None)


def _same_random_numbers(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Put back the random number generators of the CPU and of the devices of `tensors` at the end."""
    return torch.random.fork_rng({each.device.index or 0 for each in tensors if each.device.type == "cuda"})


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put back, bit for bit, the model's mode and buffers and the random number generators at the end."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        with _same_random_numbers(model.parameters()):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                if buffer is not None and values is not None:
                    buffer.copy_(values)
                module._buffers[name] = buffer
