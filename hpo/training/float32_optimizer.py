"""Optimiser steps in fp32 over weights, or with moments, of a shorter dtype.

A bf16 number has 8 bits of mantissa. Adam's second moment moves by 0.1 % of the difference in a step, and
bf16 rounds this away. So every step is in fp32, and only the weights are rounded. A bf16 weight w has
neighbours w / 256 to w / 128 away, so rounding to nearest loses an update below w / 512, in every step again,
and weight decay too. Fine-tuning at a rate of 2e-5 moves a weight of 0.05 by less.

Adam's two moments take twice the memory of fp32 weights. Under `optimizer_state` they are stored in fewer
bits between steps:

    bf16   stochastic rounding with an exact mean. Under rounding to nearest, a moment with a change of 0.1 %
           in a step would never change.
    int8   blocks of 256 consecutive weights. Each number is one of 256 fractions of the largest of its block,
           dense near 0 by powers of ten ("dynamic", Dettmers et al. 2022, arXiv 2110.02861).

int8 is the format of torchao's 8-bit optimisers, with equal results. torchao compiles the step for every
shape and every value of weight decay and beta; without a compiler, its step took 37 times as long as
PyTorch's fused one on a CPU. Here PyTorch's fused optimiser steps on one chunk of weights at a time, with
decoded moments, on every device. Tensors with less than `MIN_ELEMENTS` keep fp32, as in torchao. If blocks do
not divide a tensor, zeros fill the last block; torchao keeps fp32 there.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

MIN_ELEMENTS = 4096
SIGNED = {"exp_avg": True, "exp_avg_sq": False, "momentum": True}
"""{name of a moment in the optimiser's state: True if it has a sign}, for Adam and Lion."""
BLOCK = 256
_EXPONENTS = 7

Encoded = dict[str, Tensor]  # `codes` of a moment, and for int8 the `scales` of its blocks

CHUNK_ELEMENTS = 2**24  # weights in fp32 at a time; 16.8 M weights are 64 MiB, and as much for gradients
DECODED_ELEMENTS = 2**22  # the same limit for encoded moments; decoded moments take twice as much


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
    Single numbers, such as a count of steps, are left out.
    """
    dtypes: Counter[str] = Counter()
    num_bytes = elements = 0
    for state in states:
        for value in state.values():
            stored = value.values() if isinstance(value, Mapping) else [value]
            tensors = [one for one in stored if isinstance(one, Tensor) and one.dim()]
            if not tensors:
                continue
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
    """Return the table of Dettmers et al.: 0, 1, and twice as many evenly spaced entries in each decade."""
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        ends = torch.linspace(0.1, 1, count + 1)
        middles = ((ends[1:] + ends[:-1]) / 2 * 10.0 ** (exponent - _EXPONENTS + 1)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return sorted(values)


class Float32Optimizer(Optimizer):
    """An optimiser over the real weights with an inner optimiser over fp32 stand-ins.

    A step copies weights and gradients into the stand-ins, runs the inner optimiser, and rounds the weights
    back. It holds at most one chunk of stand-ins at a time, with decoded moments. fp32 parameters are stepped
    in place. Weights in `fp32_state` have moments in fp32 under every `kind`. If the inner optimiser is
    `unknown`, it is made over the real values and steps all weights at once: it may copy or combine them.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], Optimizer],
        kind: str = "fp32",
        fp32_state: Collection[Tensor] = (),
        *,
        unknown: bool = False,
    ) -> None:
        super().__init__(groups, {})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        values = {weight: weight.detach() if unknown else weight.new_empty(0) for weight in weights}
        stand_ins = {weight: nn.Parameter(value.to(torch.float32)) for weight, value in values.items()}
        self.inner = build(
            [{**group, "params": [stand_ins[w] for w in group["params"]]} for group in self.param_groups]
        )
        for stand_in in stand_ins.values():
            stand_in.data = stand_in.new_empty(0)
        start_momentum(self.inner, {stand_in: weight for weight, stand_in in stand_ins.items()})
        _copy_options(self.inner.param_groups, self.param_groups)
        most = CHUNK_ELEMENTS if kind == "fp32" else DECODED_ELEMENTS
        self.chunks = list(_chunks(stand_ins.items(), math.inf if unknown else most))
        self.kind = kind
        self._order: dict[Tensor, int] = {stand_in: n for n, stand_in in enumerate(stand_ins.values())}
        in_fp32 = {id(weight) for weight in fp32_state}
        self.moments: dict[int, dict[str, Encoded]] = {
            number: {}
            for number, weight in enumerate(weights)
            if is_encoded(weight, kind) and id(weight) not in in_fp32
        }
        """Encoded moments by parameter number; empty before the first step."""
        self.num_encoded = 0  # number of encodings so far: the seed of stochastic rounding

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        _copy_options(self.param_groups, self.inner.param_groups)
        for chunk in self.chunks:
            with_gradient = [pair for pair in chunk if pair[0].grad is not None]
            for weight, stand_in in with_gradient:
                stand_in.data = weight.detach().to(torch.float32)
                stand_in.grad = cast(Tensor, weight.grad).to(torch.float32)
                self._decode(stand_in)
            # The inner optimiser skips parameters without a gradient: all of the other chunks.
            self.inner.step()
            for weight, stand_in in with_gradient:
                self._encode(stand_in)
                stand_in.grad = None
                if weight.dtype != torch.float32:
                    weight.copy_(stand_in.detach())
                stand_in.data = stand_in.new_empty(0)

    def _decode(self, stand_in: Tensor) -> None:
        for name, encoded in self.moments.get(self._order[stand_in], {}).items():
            self.inner.state[stand_in][name] = decode(encoded, name, self.kind, stand_in.shape)

    def _encode(self, stand_in: Tensor) -> None:
        number, state = self._order[stand_in], self.inner.state[stand_in]
        if number not in self.moments:
            return
        for name in [name for name in SIGNED if name in state]:  # this order decides the seeds
            self.num_encoded += 1
            self.moments[number][name] = encode(state.pop(name), name, self.kind, self.num_encoded)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimiser's state with the learning rates of this optimiser."""
        _copy_options(self.param_groups, self.inner.param_groups)
        state = self.inner.state_dict()
        if self.kind == "fp32":
            return state
        return state | {"moments": self.moments, "num_encoded": self.num_encoded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        _copy_options(self.inner.param_groups, self.param_groups)
        if self.kind != "fp32":
            self.num_encoded = state_dict["num_encoded"]
            device = self.param_groups[0]["params"][0].device
            self.moments = tree_map(lambda tensor: tensor.to(device), state_dict["moments"])


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update({key: value for key, value in from_group.items() if key != "params"})


def start_momentum(optimizer: Optimizer, weights: Mapping[Tensor, Tensor]) -> None:
    """Give SGD the momenta of its first step: in torch 2.13, a skipped fused step leaves them unset."""
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"]:
        for parameter, weight in weights.items():
            momentum = torch.zeros_like(weight, dtype=torch.float32)
            optimizer.state[parameter]["momentum_buffer"] = momentum


def _chunks(rows: Iterable[tuple[Tensor, ...]], num_elements: float) -> Iterator[list[tuple[Tensor, ...]]]:
    """Cut rows into chunks with at most `num_elements` in their first tensors. A larger row is alone."""
    chunk: list[tuple[Tensor, ...]] = []
    size = 0
    for row in rows:
        if chunk and size + row[0].numel() > num_elements:
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row[0].numel()
    if chunk:
        yield chunk
