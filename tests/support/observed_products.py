"""Models and backends with other products than they declare, and their observed formats."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import BaseModelOutput

from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.effective import observe, observe_model
from hpo.precision.observation import Observation
from hpo.precision.table import PRECISIONS
from support.tiny import CPU, EMULATED, TinyEncoder

Round = Callable[[Tensor], Tensor]


Compute = Callable[[nn.Module, Tensor, Tensor], Tensor]


def unrounded(values: Tensor) -> Tensor:
    return values


def to_tf32(values: Tensor) -> Tensor:
    """Round to nearest, with 10 bits of fraction."""
    return ((values.view(torch.int32) + 2**12) & ~(2**13 - 1)).view(torch.float32)


def to_float8(dtype: torch.dtype) -> Round:
    """Scale the largest value to the format's largest, like torchao."""

    def rounded(values: Tensor) -> Tensor:
        scale = torch.finfo(dtype).max / values.abs().max()
        return (values * scale).to(dtype).float() / scale

    return rounded


def as_dtype(dtype: torch.dtype) -> Round:
    return lambda values: values.to(dtype).float()


class Library(TorchDispatchMode):
    """A backend with rounded inputs of products of at least so many rows."""

    def __init__(self, rounding: Round, least_rows: int = 0) -> None:
        super().__init__()
        self.rounding, self.least_rows = rounding, least_rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1)}.get(func._schema.name)
        if at and len(args[at[0]]) >= self.least_rows:
            args = list(args)
            for i in at:
                args[i] = self.rounding(args[i].float()).to(args[i].dtype)
        return func(*args, **(kwargs or {}))


def products(module: nn.Module, *inputs: Any) -> dict[str, set[str]]:
    with observe(module) as seen:
        module(*inputs)
    return dict(seen.products)


def observed(name: str, model: nn.Module, *inputs: Tensor) -> Observation:
    precision = PRECISIONS[name]
    with backend_flags(precision, EMULATED):
        prepare_model(model, precision)
        amp = MixedPrecision(precision, EMULATED, CPU)
        return observe_model(model, amp, lambda model: model(*inputs))


class Own(nn.Module):
    """A layer with its own code."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.compute = compute

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(self.compute(self, hidden, self.weight), 0.1, self.training)


def plain(_: nn.Module, hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight)


def cast_back(_: nn.Module, hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute in fp32 and return bf16."""
    with torch.autocast("cpu", enabled=False):
        return F.linear(hidden.float(), weight.float()).to(torch.bfloat16)


def rounded_first(_: nn.Module, hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden.bfloat16().float(), weight.bfloat16().float())


def only_in(is_training: bool, compute: Compute) -> Compute:
    return lambda module, *args: (compute if module.training == is_training else plain)(module, *args)


wide_in_training, wide_in_evaluation = only_in(True, cast_back), only_in(False, cast_back)
rounded_in_training = only_in(True, rounded_first)


class WithOwn(TinyEncoder):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.own = Own(compute)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        hidden = torch.tanh(self.dense(self.embedding(input_ids)))
        return BaseModelOutput(self.norm(self.own(hidden).flatten(0, 1)).unflatten(0, hidden.shape[:2]))
