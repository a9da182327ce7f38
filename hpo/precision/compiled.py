"""Which precision a compiled model computes in: measured by what it loses of its weights.

The compiler fuses the modules of a model and picks the kernels, so no module can be called by itself. But
what goes in is the model's own: every second weight is changed by a relative 2^-k around values with two bits
of fraction, which all formats have. In a format that loses the change (see `hpo.precision.effective`), loss,
gradients and logits stay the same bit for bit; in one that keeps it, some of them change. No other shapes and
no other modules are run than in training, so nothing is compiled again.

Changed together, all layers of a reduced precision must lose the change; changed alone, each layer in fp32
must keep it. What a layer in fp32 keeps may still be rounded away by reduced layers behind it, above all on
the way to a few logits: a layer is only said to lose a change where a larger one, which every format keeps,
shows in so many numbers that some of them had to show the smaller one. The weights are written back bit for
bit.
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
REDUCED_KEEPS = {"bfloat16": 5, "float16": 9}
"""{format: the largest k that it keeps}."""
_CERTAIN = 20
"""Numbers that are expected to change where none does: e^-20 is the chance of that."""


def observe_compiled(
    model: nn.Module, step: Step, precision: Precision, float32: Collection[str] = ()
) -> str:
    """Why the compiled model's products are not the precision's; empty when they are.

    `float32` are modules that are to be fp32. Layers of one class and shape, which the compiler treats alike,
    are looked at once where each must be changed alone. Not looked at are weights in bf16, whose products can
    be nothing else, and float8 layers, which scale their weights by the largest.
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
    reduced = [name for name in layers if lost_at and name not in float32]
    alone = {_kind(model, name): name for name in reversed(layers) if name not in reduced}

    def outputs() -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        with left_as_it_was(model):  # buffers too, which a step in training mode may change
            return step()

    with _on_grid(layers) as change:
        base = outputs()

        def num_changed(names: Collection[str], k: int | None) -> dict[str, int]:
            """{mode: how many numbers of what came out}."""
            change(names, k)
            different = {
                mode: _num_different(*two) for mode, *two in zip(MODES, outputs(), base, strict=True)
            }
            change(names, None)
            return different

        noisy = _shown(num_changed((), None))  # two passes over the same differ: nothing can be told
        if lost_at and _shown(num_changed(reduced, lost_at)) - noisy:
            for name in reduced:
                if modes := _shown(num_changed([name], lost_at)) - noisy:
                    return _found(name, f"in more than {precision.products}", modes)
        kept_at, control_at, needed = KEPT_AT["tf32" if precision.tf32 else "float32"], EVERY_FORMAT_KEEPS, 1
        if lost_at:  # numbers that change are as many times fewer as the change is smaller
            kept_at, control_at = lost_at, REDUCED_KEEPS[precision.products]
            needed = _CERTAIN * 2 ** (kept_at - control_at)
        for name in reversed(alone.values()):
            if modes := set(MODES) - _shown(num_changed([name], kept_at)):
                modes &= _shown(num_changed([name], control_at), needed)
            if modes:
                return _found(name, "in less than it should", modes)
    return ""


def _kind(model: nn.Module, name: str) -> object:
    module = model.get_submodule(name)
    return type(module), *(weight.shape for weight in module.parameters(recurse=False))


def _found(name: str, what: str, modes: Collection[str]) -> str:
    where = "" if len(modes) == len(MODES) else f" in {''.join(modes)}"
    return f"compiled, {name} computed {what}{where}."


def _shown(num_changed: dict[str, int], needed: int = 1) -> set[str]:
    return {mode for mode, number in num_changed.items() if number >= needed}


def _num_different(one: Sequence[Tensor], other: Sequence[Tensor]) -> int:
    pairs = zip(one, other, strict=True)
    return sum(int((a.nan_to_num() != b.nan_to_num()).sum()) for a, b in pairs)


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
