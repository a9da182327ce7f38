"""Which precision a compiled model computes in: measured by what it loses of its weights.

The compiler fuses the modules of a model and picks the kernels, so no module can be called by itself. But
what goes in is the model's own: every second weight is changed by a relative 2^-k around values with two bits
of fraction, which all formats have. In a format that loses the change (see `hpo.precision.effective`), loss,
gradients and logits stay the same bit for bit; in one that keeps it, some of them change. No other shapes and
no other modules are run than in training, so nothing is compiled again.

Changed together, all layers of a reduced precision must lose the change; changed alone, each layer of fp32 or
TF32 must keep it. A layer is only said to lose a change where a larger one, which every format keeps, shows.
The weights are written back bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hpo.precision.amp import is_matmul_module
from hpo.precision.effective import left_as_it_was
from hpo.precision.table import Precision

MODES = ("training", "evaluation")
Step = Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]]
"""Calls the model in each of the modes, always on the same inputs, and returns what came out."""

LOST_AT = {"bfloat16": 9, "float16": 12}
"""{format: a k that it loses}; tf32 may keep it, since a GPU has products of few rows without TF32."""
KEPT_AT = {"float32": 12, "tf32": 9}
"""{format: a k that it keeps}."""
EVERY_FORMAT_KEEPS = 2


def observe_compiled(model: nn.Module, step: Step, precision: Precision) -> str:
    """Why the compiled model's products are not the precision's; empty when they are.

    Layers of one class and shape, which the compiler treats alike, are looked at once where each must be
    changed alone. Not looked at are weights in bf16, whose products can be nothing else, and float8 layers,
    which scale their weights by the largest.
    """
    if precision.float8:
        return ""
    matrices = {
        name: [weight for weight in module.parameters(recurse=False) if weight.dim() >= 2]
        for name, module in model.named_modules()
        if is_matmul_module(module)
    }
    layers = {name: weights for name, weights in matrices.items() if weights[0].dtype == torch.float32}
    lost_at = LOST_AT.get(precision.products)

    def outputs() -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        with left_as_it_was(model):  # buffers too, which a step in training mode may change
            return step()

    with _on_grid(layers) as change:
        base = outputs()

        def shown(names: Iterable[str], k: int | None) -> set[str]:
            """The modes in which what came out is another."""
            change(names, k)
            different = {mode for mode, *two in zip(MODES, outputs(), base, strict=True) if _differ(*two)}
            change(names, None)
            return different

        noisy = shown((), None)  # two passes over the same differ: nothing can be told
        if lost_at:
            if not shown(layers, lost_at) - noisy:
                return ""
            for name in layers:
                if modes := shown([name], lost_at) - noisy:
                    return _message(name, f"in more than {precision.products}", modes)
            return ""
        kept_at = KEPT_AT[precision.products]
        alone = {_kind(model, name): name for name in reversed(layers)}
        for name in reversed(alone.values()):
            if modes := set(MODES) - shown([name], kept_at):
                modes &= shown([name], EVERY_FORMAT_KEEPS)
            if modes:
                return _message(name, "in less than it should", modes)
    return ""


def _kind(model: nn.Module, name: str) -> object:
    module = model.get_submodule(name)
    return type(module), *(weight.shape for weight in module.parameters(recurse=False))


def _message(name: str, what: str, modes: Collection[str]) -> str:
    where = "" if len(modes) == len(MODES) else f" in {''.join(modes)}"
    return f"compiled, {name} computed {what}{where}."


def _differ(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


@contextlib.contextmanager
def _on_grid(layers: Mapping[str, Sequence[Tensor]]) -> Iterator[Callable[[Iterable[str], int | None], None]]:
    """Round the weights to fractions of two bits; a function changes those of some layers by 2^-k (None: puts
    them back)."""
    originals = {name: [weight.detach().clone() for weight in weights] for name, weights in layers.items()}

    def change(names: Iterable[str], k: int | None) -> None:
        with torch.no_grad():
            for name in names:
                for weight, original in zip(layers[name], originals[name], strict=True):
                    mantissa, exponent = torch.frexp(original)
                    values = torch.ldexp(torch.round(mantissa * 8) / 8, exponent)
                    if k is not None:
                        is_second = torch.arange(values.numel(), device=values.device) % 2
                        values = values * (1 + is_second.reshape(values.shape) * 2.0**-k)
                    weight.copy_(values)

    try:
        change(layers, None)
        yield change
    finally:
        with torch.no_grad():
            for name, weights in layers.items():
                for weight, original in zip(weights, originals[name], strict=True):
                    weight.copy_(original)
