"""The operator that made the first number that is not finite, in models broken on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_encoders import make_batch, make_model, scalar_loss
from torch import Tensor, nn

from hpo.models.multitask import MultitaskModel
from hpo.trial.nonfinite import FirstNonfinite, Origin

DENSE = "encoder.encoder.layer.1.output.dense"


def first(model: MultitaskModel, loss: Callable[[MultitaskModel], Tensor] = scalar_loss) -> Origin | None:
    with FirstNonfinite() as watched:
        with torch.autocast("cpu", torch.float16):
            value = loss(model)
        value.backward()
    return watched.origin


def hooked(change: Callable[[Tensor], Tensor], name: str = DENSE) -> MultitaskModel:
    model = make_model()
    module: Any = model.get_submodule(name)
    forward = module.forward
    module.forward = lambda *args, **options: change(forward(*args, **options))
    return model


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_sound_model_has_no_origin(recomputes: bool) -> None:
    assert first(make_model(gradient_checkpointing=recomputes)) is None


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_product_that_overflows(recomputes: bool) -> None:
    model = make_model(gradient_checkpointing=recomputes)
    nn.init.constant_(model.get_submodule(DENSE).weight, 3e4)
    nn.init.constant_(model.get_submodule("encoder.encoder.layer.1.intermediate.dense").bias, 10.0)
    assert first(model) == Origin(DENSE, "aten.addmm.default", "forward", "float16", 3e4)


def test_a_cast_that_overflows() -> None:
    model = make_model()
    nn.init.constant_(model.get_submodule(DENSE).weight, 1e6)
    assert first(model) == Origin(DENSE, "aten._to_copy.default", "forward", "float16", 1e6)


@pytest.mark.parametrize("name", [DENSE, "encoder.encoder.layer.0", "encoder.embeddings", "heads.1.1"])
def test_a_gradient_that_breaks_in_the_backward_pass(name: str) -> None:
    """The square root of zero is fine; its derivative is not."""
    origin = first(hooked(lambda output: output + (output * 0).sqrt(), name))
    assert (origin.module, origin.phase) == (name, "backward")


def test_what_is_after_the_logits_is_the_loss() -> None:
    def overflows(model: MultitaskModel) -> Tensor:
        return torch.stack([z.float().sum() for z in model(*make_batch()).values()]).sum() * math.inf

    assert first(make_model(), overflows).module is None
    origin = first(make_model(), lambda model: (scalar_loss(model) * 0).sqrt())
    assert (origin.module, origin.phase) == (None, "backward")


@pytest.mark.parametrize(("keeps", "operator"), [(1, None), (0, "aten._softmax.default")])
def test_a_mask_of_minus_infinity_is_no_origin_and_a_row_of_it_is(keeps: int, operator: str | None) -> None:
    def change(output: Tensor) -> Tensor:
        hidden = torch.arange(output.shape[-1]) >= keeps
        bias = torch.zeros(output.shape[-1]).masked_fill(hidden, -math.inf)
        return (output + bias).softmax(dim=-1)

    origin = first(hooked(change))
    assert (origin and origin.operator) == operator
    assert origin is None or origin.module == DENSE


def test_a_weight_that_was_not_finite_before() -> None:
    model = make_model()
    with torch.no_grad():
        model.get_submodule(DENSE).weight[0, 0] = math.nan
    origin = first(model)
    assert origin is not None
    assert origin.module == DENSE
    assert math.isnan(origin.largest_input)


def test_a_constant_that_is_overwritten_is_no_origin() -> None:
    def change(output: Tensor) -> Tensor:
        return output + torch.full_like(output, math.inf).zero_()

    assert first(hooked(change)) is None
