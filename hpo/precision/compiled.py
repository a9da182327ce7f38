"""The precision of a compiled model, measured by small changes of its weights.

The compiler fuses operators and picks kernels, so no product can be called alone. But weights can be changed.
They are rounded to two bits of fraction, and every second value is changed by a relative 2^-k. In a format
too narrow for the change (see `hpo.precision.planted`), loss, gradients and logits stay the same bit for
bit; in a wider one, some of them change. The shapes are the trial's, so nothing is compiled again.

1. All weights are changed by a term too small for their formats. No result may change.
2. Each kind of weight is changed alone by a term inside its format. Some result must change.
3. If none does, a later sum may have rounded the change away: with a large bias, or in nearly uniform
   attention. So the weight is also multiplied by powers of two, which no format rounds.
4. If still none does, the weight is changed by a term inside every format. If a result changes now, the
   change of step 2 was lost. Otherwise the weight is unused, or its results are noise, and it is unverified.

A part in fp32 under autocast is unverified if step 2 changes nothing, because the next product may round its
output. A result is not compared if it differs between two equal passes. The weights are restored bit for bit.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hpo.precision.conditions import unchanged
from hpo.precision.frozen import FrozenLinear
from hpo.precision.observation import NO_PRODUCT, TF32_UNSEEN, Agreement, Observation, some
from hpo.precision.table import Precision
from hpo.random_numbers import same_random_numbers

MODES = ("training", "evaluation")
Results = tuple[Sequence[Tensor], Sequence[Tensor]]
Step = Callable[[], Results]
"""Call the model in each of the modes on the same inputs, and return its results."""

LOSES = {"tf32": 12, "float16": 12, "bfloat16": 9, "float8": 5}
"""{format: k of a change too small for it}."""
KEEPS = {"float32": 12, "tf32": 9, "float16": 9, "bfloat16": 5, "float8": 2}
"""{format: k of a change inside it}."""
EVERY_FORMAT_KEEPS = 2
SCALES = (2.0**4, 2.0**8)
_SMALLEST = 2.0**-10
"""Smaller values, relative to the largest, are set to 0: fp16 and float8 have too few bits for them."""
_ONES = {torch.int8: 64, torch.uint8: 0xF0}
"""{dtype of a stored matrix: a fill}, for a matrix of its scales times a power of two, or (nf4, two values in
a byte) times 1 and -1."""


class _Change(Protocol):
    def __call__(self, changes: Mapping[str, int | None], scale: float = 1.0) -> None:
        """Change weights by a relative 2^-k (None: by 0), and multiply them."""


class _Effects:
    """Changes of weights, and the modes in which the results show them. Noisy results do not count."""

    def __init__(self, change: _Change, outputs: Step) -> None:
        self._change, self._outputs = change, outputs
        self._base = outputs()
        self._noise: set[tuple[str, int]] = set()
        self.add_noise()

    def add_noise(self) -> None:
        """Look for results that differ between equal passes."""
        self._noise |= _differences(self._outputs(), self._base)

    def shown(self, changes: Mapping[str, int]) -> set[str]:
        """Return the modes with another result."""
        self._change(changes)
        different = _differences(self._outputs(), self._base) - self._noise
        self._change(dict.fromkeys(changes))
        return {mode for mode, _ in different}

    def shown_scaled(self, name: str, k: int) -> set[str]:
        """Return the modes in which a change of a larger weight shows."""
        modes: set[str] = set()
        for scale in SCALES:
            self._change({name: None}, scale)
            unchanged = self._outputs()
            noise = self._noise | _differences(self._outputs(), unchanged)
            self._change({name: k}, scale)
            modes |= {mode for mode, _ in _differences(self._outputs(), unchanged) - noise}
        self._change({name: None})
        return modes


def observe_compiled(model: nn.Module, step: Step, precision: Precision, seen: Observation) -> Agreement:
    """Compare the compiled model with `precision`. `seen` has the products of the eager model.

    The compiler treats weights of one class, shape and format alike. One of each is changed alone.
    """
    # A change of a shared weight shows in the parts in fp32, whatever its other products are. Only the eager
    # model shows the products of buffers.
    parameters = dict(model.named_parameters())
    formats = {
        name: seen.expected(name, precision)
        for name in seen.products
        if name in parameters and name not in seen.shared_weights
    }
    carriers = {name: _carrier(model, name) for name in formats}
    for name, tensor in carriers.items():
        if not tensor.is_floating_point() or type(tensor) not in (Tensor, nn.Parameter):
            return Agreement(None, f"compiled, {name} is quantised, so that its products cannot be measured.")

    def outputs() -> Results:
        with unchanged(model), same_random_numbers():  # a step in training mode may change buffers
            return step()

    with _on_grid(model, carriers) as change:
        effects = _Effects(change, outputs)
        # A GPU may run small products without TF32.
        lost = {} if precision.tf32 else {n: LOSES[kind] for n, kind in formats.items() if kind in LOSES}
        if lost and effects.shown(lost):
            effects.add_noise()  # a tensor may differ only now and then
            for name, k in lost.items():
                if modes := effects.shown({name: k}):
                    return _disagreement(name, f"in more than {formats[name]}", modes)
            if effects.shown(lost):
                return Agreement(None, "compiled, a change of all weights shows, but of no single one.")
        hidden: list[str] = []
        loses_as_tf32 = False
        # No head reads the encoder's pooler.
        named = [name for name in reversed(formats) if ".pooler." not in name]
        kinds = {(_kind(model, name), formats[name]): name for name in named}
        for name in reversed(kinds.values()):
            modes = effects.shown({name: KEEPS[formats[name]]})
            lacking = [mode for mode in MODES if mode not in modes]
            if lacking:
                scaled = effects.shown_scaled(name, KEEPS[formats[name]])
                lacking = [mode for mode in lacking if mode not in scaled]
            if lacking:
                visible = effects.shown({name: EVERY_FORMAT_KEEPS})
                lost_modes = visible.intersection(lacking)
                if lost_modes and name not in seen.float32_weights:
                    return _disagreement(name, "in less than it should", lost_modes)
                hidden.append(f"{name} in {' and '.join(lacking)}")
            if precision.tf32 and not loses_as_tf32:
                loses_as_tf32 = bool(modes - effects.shown({name: LOSES["tf32"]}))
    if not kinds:
        return Agreement(None, f"compiled, {NO_PRODUCT}")
    if hidden:
        counts = f"{len(hidden)} of {len(kinds)} kinds of weights"
        return Agreement(None, f"compiled, nothing shows the products of {counts}: {some(hidden)}.")
    if precision.tf32 and not loses_as_tf32:
        return Agreement(None, f"compiled, {TF32_UNSEEN}")
    return Agreement(True)


def _carrier(model: nn.Module, name: str) -> Tensor:
    """Return the tensor to change: the weight, or the scale of a weight in integers."""
    module, weight = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    if isinstance(module, FrozenLinear) and weight is module.stored and module.scale is not None:
        return module.scale
    return weight


def _kind(model: nn.Module, name: str) -> object:
    module, _, attribute = name.rpartition(".")
    weight = model.get_parameter(name)
    return type(model.get_submodule(module)), attribute, weight.shape, weight.dtype


def _disagreement(name: str, what: str, modes: Collection[str]) -> Agreement:
    where = "" if len(modes) == len(MODES) else f" in {''.join(modes)}"
    return Agreement(False, f"compiled, {name} was multiplied {what}{where}.")


def _differences(one: Results, other: Results) -> set[tuple[str, int]]:
    """Return mode and number of each differing tensor."""
    return {
        (mode, number)
        for mode, *both in zip(MODES, one, other, strict=True)
        for number, (a, b) in enumerate(zip(*both, strict=True))
        if not torch.equal(a.nan_to_num(), b.nan_to_num())
    }


@contextlib.contextmanager
def _on_grid(model: nn.Module, carriers: Mapping[str, Tensor]) -> Iterator[_Change]:
    """Round the weights to fractions of two bits; yield a function that changes some."""
    tensors = [*carriers.values(), *(model.get_parameter(name) for name in carriers)]
    originals = {id(tensor): (tensor, tensor.detach().clone()) for tensor in tensors}

    def change(changes: Mapping[str, int | None], scale: float = 1.0) -> None:
        with torch.no_grad():
            for name, k in changes.items():
                values = scale * _rounded(originals[id(carriers[name])][1])
                if k is not None:
                    is_second = torch.arange(values.numel(), device=values.device) % 2
                    values = values * (1 + is_second.reshape(values.shape) * 2.0**-k)
                carriers[name].copy_(values)

    try:
        with torch.no_grad():
            for tensor, _ in originals.values():
                if tensor.dtype in _ONES:
                    tensor.fill_(_ONES[tensor.dtype])
        change(dict.fromkeys(carriers))
        yield change
    finally:
        with torch.no_grad():
            for tensor, original in originals.values():
                tensor.copy_(original)


def _rounded(weight: Tensor) -> Tensor:
    """Round to two bits of fraction, at most a power of two. The first value is 1.75 times this power.

    A float8 layer scales its weights by the largest value. Under every change, this is the first.
    """
    mantissa, exponent = torch.frexp(weight.detach().float())
    values = torch.ldexp(torch.round(mantissa * 8) / 8, exponent)
    largest = values.abs().max()
    if not largest:  # an adapter before its first step
        values, largest = torch.full_like(values, 2.0**-6), largest + 2.0**-6
    top = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 1)
    values = values.clamp(-top, top).masked_fill(values.abs() < top * _SMALLEST, 0)
    values.view(-1)[0] = 1.75 * top
    return values
