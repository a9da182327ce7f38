"""How an update that was computed in fp32 becomes a bf16 weight.

A bf16 weight w has neighbours w / 256 to w / 128 away, so an update of less than w / 512 is lost by rounding
to nearest, in every step anew, and weight decay too. Fine-tuning at a rate of 2e-5 moves a weight of 0.05 by
less than that. Two remedies, both in Zamirai et al. 2020, "Revisiting BFloat16 Training", arXiv 2010.06192:

stochastic   goes to the farther neighbour with the probability that makes the mean over all draws the fp32
             value exactly. Costs no memory and adds noise.
compensated  keeps what the rounding left out, itself in bf16, and adds it before the next step (Kahan 1965,
             CACM 8, 40). Together they have 16 bits of mantissa or more. Costs 2 bytes a weight.

The random bits of a weight follow from (seed, step, position of the weight): a trial that goes on from a
checkpoint draws the same ones, and so does every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

PIECE_ELEMENTS = 2**18
"""Weights that are rounded at a time; a multiple of 4, which one word of 64 random bits serves."""


class NearestRounding:
    """To the nearest bf16 number, of two the even one."""

    name = "nearest"

    def __init__(self, weights: Mapping[int, Tensor], seed: int) -> None:
        del seed
        self.weights = weights
        """By what the methods call `index`: the place among all weights of the optimiser, fp32 ones too."""

    def start_step(self) -> None:
        """Begin a step."""

    def widen(self, index: int) -> Tensor:
        """fp32 copy of what is stored of a weight."""
        return self.weights[index].detach().to(torch.float32)

    def narrow(self, index: int, values: Tensor) -> None:
        """Store fp32 `values`, of the weight's shape, as the weight. They may be overwritten."""
        self.weights[index].copy_(values)

    def residual(self, index: int) -> Tensor | None:
        """What is stored of a weight beside it, of its shape; to be added to it."""
        del index
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


class StochasticRounding(NearestRounding):
    """To one of the two bf16 neighbours at random, without bias. A number that bf16 has stays as it is."""

    name = "stochastic"

    def __init__(self, weights: Mapping[int, Tensor], seed: int) -> None:
        super().__init__(weights, seed)
        self.seed = seed
        self.num_steps = 0

    def start_step(self) -> None:
        self.num_steps += 1

    def narrow(self, index: int, values: Tensor) -> None:
        weight = self.weights[index]
        draw = random_int16((self.seed, self.num_steps, index), values.device)
        rounded = torch.empty_like(weight, memory_format=torch.contiguous_format).view(-1)
        values = values.contiguous().view(-1)
        for start in range(0, len(values), PIECE_ELEMENTS):
            piece = values[start : start + PIECE_ELEMENTS]
            round_with_bits(piece, draw(len(piece)), rounded[start : start + PIECE_ELEMENTS])
        weight.copy_(rounded.view(weight.shape))

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = int(state["num_steps"])


class CompensatedRounding(NearestRounding):
    """To nearest, with what that leaves out kept in bf16 and added before the next step."""

    name = "compensated"

    def __init__(self, weights: Mapping[int, Tensor], seed: int) -> None:
        super().__init__(weights, seed)
        self.residuals = {
            index: torch.zeros_like(weight, requires_grad=False) for index, weight in weights.items()
        }

    def widen(self, index: int) -> Tensor:
        # Converted first: PyTorch's kernels for two dtypes are slower.
        return super().widen(index).add_(self.residuals[index].to(torch.float32))

    def narrow(self, index: int, values: Tensor) -> None:
        super().narrow(index, values)
        # The difference is exact in fp32: the two are equal but for the last bits (Sterbenz 1974).
        self.residuals[index].copy_(values.sub_(super().widen(index)))

    def residual(self, index: int) -> Tensor | None:
        return self.residuals[index]

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": dict(self.residuals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; of weights that are fp32 now there is nothing to keep."""
        for index, residual in self.residuals.items():
            residual.copy_(state["residuals"][index])


WEIGHT_ROUNDINGS: dict[str, type[NearestRounding]] = {
    kind.name: kind for kind in (NearestRounding, StochasticRounding, CompensatedRounding)
}


def round_with_bits(values: Tensor, bits: Tensor, out: Tensor) -> None:
    """Round fp32 `values` [N] to bf16 `out` [N], away from zero where `bits` say so; overwrites `values`.

    bf16 is the upper half of fp32. `bits` (int16 [N], uniform) plus 2^15 is added to the lower half as an
    integer of 0 to 65535, and the lower half is dropped: the carry into the upper half, the neighbour that is
    farther from zero, has the probability (lower half) / 65536. This holds for subnormal numbers and ties,
    and across powers of two; beyond the largest bf16 number the neighbour is infinity. Infinity and NaN stay.
    """
    # A CPU sees NaN in the sum, which is quicker; a GPU would have to be waited for.
    has_nan = values.device.type != "cpu" or not bool(values.sum().isfinite())
    is_nan = values.isnan() if has_nan else None
    words = values.view(torch.int32)
    words.add_(bits.to(torch.int32)).add_(1 << 15).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(words)
    if is_nan is not None:
        out.masked_fill_(is_nan, torch.nan)


def random_int16(key: Sequence[int], device: torch.device) -> Callable[[int], Tensor]:
    """A stream of random int16 that follows from `key`: a function that draws so many more.

    What is drawn on a CPU (numpy's SFC64) does not depend on how it is cut, as long as all pieces but the
    last are multiples of 4.
    """
    words = np.random.SeedSequence(list(key))
    if device.type == "cpu":
        raw = np.random.SFC64(words).random_raw
        return lambda size: torch.from_numpy(raw(-(-size // 4)).view(np.int16)[:size])
    generator = torch.Generator(device).manual_seed(int(words.generate_state(1, np.uint64)[0]))
    return lambda size: torch.empty(size, dtype=torch.int16, device=device).random_(
        -(2**15), 2**15, generator=generator
    )
