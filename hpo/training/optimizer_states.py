"""Formats of an optimiser's moments between its steps: `optimizer_state`.

Adam's two moments take twice the memory of fp32 weights. Between steps they are stored in fewer bits:

    bf16   stochastic rounding with an exact mean. Under rounding to nearest, a moment with a change of 0.1 %
           in a step would never change.
    int8   blocks of 256 consecutive weights. Each number is one of 256 fractions of the largest of its block,
           dense near 0 by powers of ten ("dynamic", Dettmers et al. 2022, arXiv 2110.02861).

int8 is the format of torchao's 8-bit optimisers, with equal results. torchao compiles the step for every
shape and every value of weight decay and beta. Without a compiler, its step took 37 times as long as
PyTorch's fused one on a CPU. Here PyTorch's fused optimiser steps in fp32 on one chunk of weights at a time,
with decoded moments (`hpo.training.float32_optimizer`). This compiles nothing and runs on every device.

Tensors with less than `MIN_ELEMENTS` keep fp32, as in torchao. If blocks do not divide a tensor, zeros fill
the last block; torchao keeps fp32 there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ELEMENTS = 4096
SIGNED = {"exp_avg": True, "exp_avg_sq": False, "momentum": True}
"""{name of a moment in the optimiser's state: True if it has a sign}, for Adam and Lion."""
BLOCK = 256
_EXPONENTS = 7

Encoded = dict[str, Tensor]
"""`codes` of a moment, and for int8 the `scales` of its blocks."""


def is_encoded(weight: Tensor, kind: str) -> bool:
    """Return whether the moments of a weight have the format `kind`, not fp32."""
    return kind != "fp32" and weight.numel() >= MIN_ELEMENTS


def encode(moment: Tensor, name: str, kind: str, seed: int) -> Encoded:
    """Encode an fp32 moment. `seed` is for stochastic rounding to bf16, and differs in each step."""
    if kind == "bf16":
        return {"codes": _round_stochastically(moment, seed)}
    blocks = F.pad(moment.flatten(), (0, -moment.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return {"codes": nearest(blocks / scales, signed=SIGNED[name]).to(torch.uint8), "scales": scales}


def decode(encoded: Mapping[str, Tensor], name: str, kind: str, shape: torch.Size) -> Tensor:
    codes = encoded["codes"]
    if kind == "bf16":
        return codes.to(torch.float32)
    blocks = _table(SIGNED[name], codes.device)[codes.int()] * encoded["scales"]
    return blocks.flatten()[: shape.numel()].view(shape)


def state_facts(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the dtypes of the stored moments, their bytes, and their bytes in fp32.

    `states` has a mapping for each weight: from a moment's name to an fp32 tensor or the result of `encode`.
    """
    dtypes: Counter[str] = Counter()
    num_bytes = elements = 0
    for state in states:
        for name, value in state.items():
            if name not in SIGNED:
                continue
            tensors = list(value.values()) if isinstance(value, Mapping) else [value]
            dtypes[str(tensors[0].dtype).removeprefix("torch.")] += 1
            num_bytes += sum(tensor.nbytes for tensor in tensors)
            elements += tensors[0].numel()
    return {"dtypes": dict(dtypes), "bytes": num_bytes, "fp32_bytes": 4 * elements}


def _round_stochastically(moment: Tensor, seed: int) -> Tensor:
    """Round to bf16, away from zero with the probability of an exact mean."""
    generator = torch.Generator(moment.device).manual_seed(seed)
    bits = moment.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, device=bits.device, dtype=torch.int32, generator=generator)
    rounded = (bits + noise) & -(1 << 16)
    return rounded.view(torch.float32).to(torch.bfloat16)


def nearest(fractions: Tensor, *, signed: bool) -> Tensor:
    """Return the index of the nearest table entry for each of `fractions`, from -1 to 1, in int32."""
    table = _table(signed, fractions.device)
    return torch.bucketize(fractions, (table[1:] + table[:-1]) / 2, out_int32=True)


@lru_cache(maxsize=16)
def _table(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(dynamic_fractions(signed=signed), device=device)


def dynamic_fractions(*, signed: bool) -> list[float]:
    """Return the table of Dettmers et al.: 0, 1, and evenly spaced entries in each decade.

    Each decade has twice as many entries as the one below it.
    """
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        ends = torch.linspace(0.1, 1, count + 1)
        middles = ((ends[1:] + ends[:-1]) / 2 * 10.0 ** (exponent - _EXPONENTS + 1)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return sorted(values)
