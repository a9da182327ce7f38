"""The operator of the first non-finite number, in models with planted faults."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_encoders import make_batch, make_model, scalar_loss
from torch import Tensor, nn

from hpo.models.multitask import MultitaskModel
from hpo.trial.measure import FirstNonfinite

DENSE = "encoder.encoder.layer.1.output.dense"


def first(model: MultitaskModel, loss: Callable[[MultitaskModel], Tensor] = scalar_loss) -> tuple[Any, Any]:
    """The operator and its module."""
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
