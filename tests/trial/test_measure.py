"""Measurements of models with planted faults, and the operator of the first non-finite number."""

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
from support.tiny_encoders import make_batch, make_model, scalar_loss
from torch import Tensor, nn

from hpo.config.sections import CompatConfig
from hpo.models.multitask import MultitaskModel
from hpo.precision.table import PRECISIONS
from hpo.trial.compat import Compatibility, judge
from hpo.trial.measure import FirstNonfinite

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


@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_batch_norm_in_a_head(name: str) -> None:
    model = tiny_model()
    last = nn.Linear(8, model.tasks[0].num_outputs)
    model.heads[0] = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), last)
    with unchanged(model):
        measurement = tiny_measurement(model, tiny_batch(), tiny_objective(), name)
    assert judge(measurement, CompatConfig()).verdict == "ok", measurement


@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_states_in_fp32_from_any_weights(name: str) -> None:
    """As Mamba's."""
    found = check(Broken(lambda _, hidden: hidden.float()), name)
    assert found.verdict == "ok", found


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
def test_broken_module_is_found_and_named(extra: Any, names: str, verdict: str, reason: str) -> None:
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


DENSE = "encoder.encoder.layer.1.output.dense"


def first(model: MultitaskModel, loss: Callable[[MultitaskModel], Tensor] = scalar_loss) -> tuple[Any, Any]:
    """Return the operator and its module."""
    with FirstNonfinite() as watched:
        with torch.autocast("cpu", torch.float16):
            value = loss(model)
        value.backward()
    return watched.operator, watched.module


def hooked(change: Callable[[Tensor], Tensor], name: str = DENSE) -> MultitaskModel:
    model = make_model()
    module: Any = model.get_submodule(name)
    forward = module.forward
    module.forward = lambda *args, **options: change(forward(*args, **options))
    return model


@pytest.mark.parametrize("recomputes", [False, True])
def test_overflowing_product(recomputes: bool) -> None:
    model = make_model(gradient_checkpointing=recomputes)
    assert first(model) == (None, None)
    model.zero_grad()
    nn.init.constant_(model.get_submodule(DENSE).weight, 3e4)
    nn.init.constant_(model.get_submodule("encoder.encoder.layer.1.intermediate.dense").bias, 10.0)
    said = f"aten.addmm.default (float16) in {DENSE}, forward pass, inputs up to 3e+04"
    assert first(model) == (said, DENSE)


@pytest.mark.parametrize("name", [DENSE, "encoder.encoder.layer.0", "encoder.embeddings", "heads.1.1"])
def test_broken_gradient(name: str) -> None:
    """The square root of zero is fine; its derivative is not."""
    operator, module = first(hooked(lambda output: output + (output * 0).sqrt(), name))
    assert module == name
    assert "backward pass" in operator


def test_broken_loss() -> None:
    def overflows(model: MultitaskModel) -> Tensor:
        return torch.stack([z.float().sum() for z in model(*make_batch()).values()]).sum() * math.inf

    for loss, phase in ((overflows, "forward"), (lambda model: (scalar_loss(model) * 0).sqrt(), "backward")):
        operator, module = first(make_model(), loss)
        assert module is None
        assert f"in the loss, after the logits, {phase} pass" in operator


@pytest.mark.parametrize("keeps", [1, 0])
def test_mask_is_no_origin_unless_it_fills_a_row(keeps: int) -> None:
    def change(output: Tensor) -> Tensor:
        bias = torch.zeros(output.shape[-1])
        bias[keeps:] = -math.inf
        return (output + bias + torch.full_like(output, math.inf).zero_()).softmax(dim=-1)

    operator, module = first(hooked(change))
    assert module == (None if keeps else DENSE)
    assert operator is None if keeps else operator.startswith("aten._softmax.default")
