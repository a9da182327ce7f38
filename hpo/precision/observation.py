"""What was observed of a model's products, and whether it agrees with a precision."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from hpo.errors import first_names
from hpo.precision.amp import fp32_backends, reduced_precision_reduction
from hpo.precision.float8 import no_float8
from hpo.precision.origins import UNMEASURED, WIDEST_FIRST
from hpo.precision.table import Precision

COMPILED = "the code of the model compiles it, and only the uncompiled model was measured."
UNVERIFIED = "the precision of the products is unverified"
NO_PRODUCT = "no product with a weight was seen."
TF32_UNSEEN = "TF32 is on, but no product was seen to use it. A GPU may run small products without it."
LOSS = "the loss"
"""The name of products outside of all modules."""


class Agreement(NamedTuple):
    """Answer to the question: does a model compute in its precision?"""

    agrees: bool | None
    """None: unverified."""
    reason: str = ""
    """Reason for a disagreement or a missing verification."""


@dataclass
class Observation:
    """The formats of a model's products in the observed passes."""

    products: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """{name of a weight: formats of its products}; UNMEASURED stands for a product without a measurement."""
    others: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """{trained weight, module or LOSS: dtypes of products that were not measured}."""
    flops: dict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    """{(forward or backward, name, format): floating-point operations}."""
    unseen: set[str] = field(default_factory=set)
    """Matrices in use of which no product was seen."""
    float8: dict[str, Any] = field(default_factory=dict)
    """The `float8_facts` of the model."""
    float8_weights: frozenset[str] = frozenset()
    float32_weights: frozenset[str] = frozenset()
    """Weights of the parts in fp32."""
    float32_modules: frozenset[str] = frozenset()
    shared_weights: set[str] = field(default_factory=set)
    """Weights of the rest of the model with fp32 products inside these parts, such as relative positions.

    `products` has only their other products.
    """
    tf32: bool | None = None
    """Whether the flag of TF32 is on; None: the device has no TF32, as a CPU."""
    compiled: Agreement | None = None
    """The agreement of the compiled model; None: the model is eager."""
    kernels: dict[Any, str] = field(default_factory=dict, repr=False)
    """The measured formats by the key of a call."""

    def telemetry(self) -> dict[str, Any]:
        return {
            "linear_products": dict(Counter("/".join(sorted(each)) for each in self.products.values())),
            "shares": {phase: self.shares(phase) for phase in ("forward", "backward")},
            "tf32": bool(self.tf32),
            "reduced_precision_reduction": reduced_precision_reduction(),
            "compiled": self.compiled is not None,
            **self.float8,
        }

    def shares(self, phase: str) -> dict[str, float]:
        """Return {format: share of the floating-point operations} of the products of a phase."""
        counts: dict[str, float] = defaultdict(float)
        for (of, _, kind), flops in self.flops.items():
            counts[kind] += flops * (of == phase)
        return {kind: round(of / sum(counts.values()), 4) for kind, of in counts.items() if of}

    def expected(self, name: str, precision: Precision) -> str:
        """Return the format of a weight's products under `precision`. Under fp8, most layers may be bf16."""
        if precision.autocast and (name in self.float32_weights or name in self.float32_modules):
            return "float32"
        is_wider = precision.float8 and name not in self.float8_weights
        return precision.linear_dtype if is_wider else precision.products

    def agreement(self, precision: Precision) -> Agreement:
        """Compare the products with `precision`. A GPU may run small products without TF32."""
        wrong = {False: list[str](), True: list[str]()}
        for name in {**self.products, **self.others}:
            formats = self.products.get(name, set()) | self.others.get(name, set())
            expected = self.expected(name, precision)
            allowed = {expected, UNMEASURED, *(["float32"] if precision.tf32 else [])}
            if name == LOSS:
                allowed.update(WIDEST_FIRST[: WIDEST_FIRST.index(expected)])
            if others := formats - allowed:
                phases = {phase for phase, of, kind in self.flops if of == name and kind in others}
                where = ", backward" if phases == {"backward"} else ""
                wrong[name in self.products].append(f"{name} ({'/'.join(sorted(others))}{where})")
        num_weights = len(self.products)
        what = f"in {precision.products}{', or in float32 inside fp32_parts' if self.float32_weights else ''}"
        if wrong[True]:
            counts = f"{len(wrong[True])} of {num_weights} weights"
            return Agreement(False, f"{counts} were not multiplied {what}: {some(wrong[True])}.")
        if wrong[False]:
            return Agreement(False, f"products without weights were not {what}: {some(wrong[False])}.")
        if precision.float8 and (why := no_float8(self.float8)):
            return Agreement(False, why)
        if self.tf32 not in (None, precision.tf32) and precision.autocast is None:
            return Agreement(False, f"TF32 is {'on' if self.tf32 else 'off'}.")
        if self.compiled is not None:
            return self.compiled
        unmeasured = [name for name, formats in self.products.items() if UNMEASURED in formats]
        if unmeasured:
            counts = f"{len(unmeasured)} of {num_weights} weights"
            return Agreement(None, f"The products of {counts} could not be measured: {some(unmeasured)}.")
        if self.unseen:
            seen = "No product was seen of matrices that the model uses"
            return Agreement(None, f"{seen}: {some(sorted(self.unseen))}.")
        if not num_weights:
            return Agreement(None, NO_PRODUCT.capitalize())
        if precision.tf32 and not any("tf32" in formats for formats in self.products.values()):
            return Agreement(None, TF32_UNSEEN)
        return Agreement(True)


def some(names: Iterable[str]) -> str:
    """Return the first three names and the number of the others."""
    return first_names([*names], 3)


def conditions(model: nn.Module) -> dict[str, str]:
    """Return what decides the formats of products: the dtypes of weights, and PyTorch's switches."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = {name: str(tensor.dtype) for name, tensor in tensors if tensor.is_floating_point()}
    for device in {tensor.device.type for _, tensor in tensors}:
        switches = zip(("matmul", "conv", "rnn"), fp32_backends().get(device, ()), strict=False)
        found |= {f"fp32 {name} on {device}": switch.fp32_precision for name, switch in switches}
        if device == "cuda":
            found |= {name: str(is_on) for name, is_on in reduced_precision_reduction().items()}
    return found


def changed_conditions(before: Mapping[str, str], model: nn.Module) -> str:
    """Return which `conditions` of the model are others than `before`; empty: none."""
    now = conditions(model)
    others = [name for name, value in before.items() if now.get(name, value) != value]
    changes = some(f"{name} ({before[name]}, then {now[name]})" for name in others)
    return f"after the observation there were changes: {changes}." if others else ""
