"""The state of an optimiser between its steps, in fewer bits: `optimizer_state`.

Adam's two moments take twice the memory of fp32 weights. Between steps a moment is kept in blocks of weights
that follow each other, each number as a fraction of the largest of its block:

    bf16   as it is, rounded up or down by chance, so that the mean is exact: to the nearest, a moment that
           moves by 0.1 % a step would stay where it is (no blocks)
    fp8    e4m3; blocks of 256
    int8   one of 256 fractions, dense near 0 by powers of ten ("dynamic", Dettmers et al. 2022, arXiv
           2110.02861); blocks of 256
    int4   one of 16: dynamic for a moment with a sign, linear without 0 for the second, since a step is
           divided by its root (Li et al. 2023, arXiv 2309.01507); blocks of 128

fp8, int8 and int4 are the formats of torchao's optimisers, and steps end where theirs do. Those are not used
themselves: they compile their step for every shape, and again for every other weight decay or beta, which a
search varies; without a compiler, a step of theirs took 37 times as long as PyTorch's fused one on a CPU.
Here the fused one steps, in fp32, on a chunk of the weights at a time, whose moments are decoded for it
(`hpo.training.optim.Float32Optimizer`). So nothing is compiled, whatever `compile` says, no package is
needed, and every device has all of them.

Tensors of less than `MIN_ELEMENTS` keep fp32, as theirs do. Where blocks do not divide a tensor, zeros fill
the last one, and theirs keeps fp32: the data may use any number of embeddings.
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
"""The moments of Adam and Lion by their names in the optimiser's state, and whether they have a sign."""
BLOCKS = {"bf16": 1, "fp8": 256, "int8": 256, "int4": 128}
_FP8 = torch.float8_e4m3fn
_BITS = {"int8": 8, "int4": 4}

Encoded = dict[str, Tensor]
"""A moment as it is kept: its `codes`, and its `scales` where it has blocks."""


def is_kept_short(weight: Tensor, kind: str) -> bool:
    """Whether the moments of such a weight are kept as `kind` says, and not in fp32."""
    return kind != "fp32" and weight.numel() >= MIN_ELEMENTS


def encode(moment: Tensor, name: str, kind: str, seed: int) -> Encoded:
    """A moment in fp32 as it is kept; `seed` is that of the chances of bf16, another one in each step."""
    if kind == "bf16":
        return {"codes": _rounded_by_chance(moment, seed)}
    blocks = F.pad(moment.flatten(), (0, -moment.numel() % BLOCKS[kind])).view(-1, BLOCKS[kind])
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    if kind == "fp8":
        scales = scales / torch.finfo(_FP8).max
        return {"codes": (blocks / scales).to(_FP8), "scales": scales}
    codes = nearest(blocks / scales, kind, signed=SIGNED[name]).to(torch.uint8)
    if kind == "int4":
        codes = codes[:, ::2] << 4 | codes[:, 1::2]
    return {"codes": codes, "scales": scales}


def decode(encoded: Mapping[str, Tensor], name: str, kind: str, shape: torch.Size) -> Tensor:
    """The moment in fp32."""
    codes = encoded["codes"]
    if kind == "bf16":
        return codes.to(torch.float32)
    if kind == "fp8":
        return _unpadded(codes.to(torch.float32) * encoded["scales"], shape)
    if kind == "int4":
        codes = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(1)
    table = _table(kind, SIGNED[name], codes.device)
    return _unpadded(table[codes.int()] * encoded["scales"], shape)


def _unpadded(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten()[: shape.numel()].view(shape)


def state_facts(kind: str, states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the moments of the weights are really kept in, and what they take.

    `states` are those of the weights, by the moments' names: a tensor in fp32, or what `encode` gave.
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
            packed = 2 if kind == "int4" and isinstance(value, Mapping) else 1
            elements += packed * tensors[0].numel()
    return {"dtypes": dict(dtypes), "bytes": num_bytes, "fp32_bytes": 4 * elements}


def _rounded_by_chance(moment: Tensor, seed: int) -> Tensor:
    """In bf16: away from zero with the probability of what is cut off, of the distance to there."""
    generator = torch.Generator(moment.device).manual_seed(seed)
    bits = moment.view(torch.int32)
    chance = torch.randint(0, 1 << 16, bits.shape, device=bits.device, dtype=torch.int32, generator=generator)
    rounded = (bits + chance) & -(1 << 16)
    return rounded.view(torch.float32).to(torch.bfloat16)


def nearest(fractions: Tensor, kind: str, *, signed: bool) -> Tensor:
    """The place in the table of what is nearest to each of `fractions`, from -1 to 1, in int32.

    As `torch.bucketize` of what lies between the entries, with whose binary search a step in int8 takes
    2.5 times as long on a CPU. The first 16 bits of a number leave two entries at most, since the relative
    gaps of a table are wider than 2^-7.
    """
    ends, first = _ends(kind, signed, fractions.device)
    code = first[(fractions.view(torch.int32) >> 16) + 2**15]
    return code + (fractions > ends[code])


@lru_cache(maxsize=16)
def _ends(kind: str, signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Up to where each entry of a table is the nearest; and by the first 16 bits of a number, in the order of
    these as an int16, the entry that is nearest to the least number which begins with them."""
    table = _table(kind, signed, device)
    between = (table[1:] + table[:-1]) / 2
    begins = torch.arange(-(2**15), 2**15, device=device, dtype=torch.int32) << 16
    least = torch.where(begins < 0, begins | 0xFFFF, begins).view(torch.float32).nan_to_num()
    first = torch.bucketize(least, between, out_int32=True)
    return torch.cat([between, between.new_tensor([torch.inf])]), first


@lru_cache(maxsize=16)
def _table(kind: str, signed: bool, device: torch.device) -> Tensor:
    """The fractions that the codes stand for, ascending."""
    if kind == "int4" and not signed:
        return torch.linspace(0, 1, 17, device=device)[1:]
    return torch.tensor(dynamic_fractions(_BITS[kind], signed=signed), device=device)


def dynamic_fractions(bits: int, *, signed: bool) -> list[float]:
    """The table of Dettmers et al.: in each decade twice as many as in the one below, evenly; and 0 and 1."""
    exponents = bits - 1
    values = [0.0, 1.0]
    for exponent in range(exponents):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        ends = torch.linspace(0.1, 1, count + 1)
        middles = ((ends[1:] + ends[:-1]) / 2 * 10.0 ** (exponent - exponents + 1)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return sorted(values)
