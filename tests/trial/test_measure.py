"""Measurements of modules with planted faults."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny import (
    CPU_PRECISIONS,
    TinyEncoder,
    tiny_batch,
    tiny_measurement,
    tiny_model,
    tiny_objective,
    unchanged,
)
from torch import Tensor, nn

from hpo.config.sections import CompatConfig
from hpo.precision.table import PRECISIONS
from hpo.trial.compat import Compatibility, judge

Compute = Callable[[nn.Linear, Tensor], Tensor]


def check(encoder: nn.Module | None, name: str, **amp: Any) -> Compatibility:
    model = tiny_model(encoder)
    with unchanged(model):
        measurement = tiny_measurement(model, tiny_batch(), tiny_objective(), name, **amp)
    return judge(measurement, CompatConfig())


class Broken(TinyEncoder):
    """The tiny encoder with one more module between it and the heads."""

    def __init__(self, extra: nn.Module | Compute) -> None:
        super().__init__()
        self.extra = extra if isinstance(extra, nn.Module) else Extra(extra)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = self.extra(output.last_hidden_state)
        return output


class Extra(nn.Module):
    """A function of a linear layer and the hidden states."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 16)
        self.compute = compute

    def forward(self, hidden: Tensor) -> Tensor:
        return self.compute(self.dense, hidden)


def nan_backward(_: nn.Linear, hidden: Tensor) -> Tensor:
    """Right in the forward pass; its gradient is NaN in reduced precision."""
    reduced = torch.is_autocast_enabled("cpu") or hidden.dtype != torch.float32
    output = hidden.clone()
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * (math.nan if reduced else 1.0))
    return output * 1.0


def no_bfloat16(dense: nn.Linear, hidden: Tensor) -> Tensor:
    """Call an operator without bf16 on PyTorch's CPU."""
    return dense(hidden) * torch.special.bessel_j0(dense(hidden).detach())


def wrong_under_autocast(_: nn.Linear, hidden: Tensor) -> Tensor:
    return -hidden if torch.is_autocast_enabled("cpu") else hidden


def nan_in_float32(_: nn.Linear, hidden: Tensor) -> Tensor:
    return hidden / torch.zeros((), dtype=hidden.dtype) * 0


def raise_anywhere(_: nn.Linear, __: Tensor) -> Tensor:
    raise ValueError("a bug")


OVERFLOW = Extra(lambda dense, hidden: dense(hidden.abs() + 1) * 1e-6)
nn.init.constant_(OVERFLOW.dense.weight, 5e4)  # fp16 ends at 65504


@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_sound_model_is_ok(name: str) -> None:
    found = check(None, name)
    assert (found.verdict, found.reasons) == ("ok", ())
    errors = found.measurement.logits_relative_error
    assert errors.keys() == {"topic", "tags", "slots", "size"}
    assert all(error == 0 if name == "fp32" else 1e-5 < error < 0.05 for error in errors.values())
    assert found.measurement.gradient_cosine > 0.999
    assert found.measurement.observed["linear_products"] == {PRECISIONS[name].linear_dtype: 5}


@pytest.mark.parametrize(
    ("extra", "names", "verdict", "reason"),
    [
        (OVERFLOW, "fp16", "incompatible", r"the first module that made them so is encoder\.extra\.dense\.$"),
        (OVERFLOW, "bf16 fp32", "ok", "^$"),
        (nan_backward, "bf16 fp16 bf16-true", "incompatible", r"^gradients not finite .* encoder\.extra\.$"),
        (nan_backward, "fp32", "ok", "^$"),
        (no_bfloat16, "bf16 bf16-true", "incompatible", "raised .*BFloat16"),
        (wrong_under_autocast, "bf16", "incompatible", "away from fp32's"),
        (nan_in_float32, "bf16 fp32", "invalid", r"^logits not finite in fp32; .* encoder\.extra\. .* model"),
        (raise_anywhere, "bf16 fp32", "invalid", "^fp32 raised ValueError: a bug"),
    ],
)
def test_broken_module_is_found_and_named(
    extra: nn.Module | Compute, names: str, verdict: str, reason: str
) -> None:
    for name in names.split():
        found = check(Broken(extra), name)
        assert found.verdict == verdict
        assert re.search(reason, " ".join(found.reasons))


def test_loss_scale_backs_off_until_gradients_are_finite() -> None:
    found = check(None, "fp16", init_scale=2.0**60)
    assert found.verdict == "ok"
    usable = found.measurement.usable_scale
    assert 1 < usable < 2.0**40
    above = check(None, "fp16", init_scale=2 * usable, min_scale=2 * usable)
    assert above.measurement.nonfinite == "gradients"


def test_dropout_rate_held_as_a_number_is_off() -> None:
    layer: Any = Extra(lambda dense, x: nn.functional.dropout(dense(x), layer.dropout, layer.training))
    layer.dropout = 0.5
    found = check(Broken(layer), "fp32")
    assert set(found.measurement.logits_relative_error.values()) == {0.0}
    assert (found.verdict, layer.dropout, layer.training) == ("ok", 0.5, True)
