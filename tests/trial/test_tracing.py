"""The operator that made the first number that is not finite, in models broken on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tiny_encoders import make_batch, make_model, scalar_loss
from torch import Tensor, nn

from hpo.models.multitask import MultitaskModel
from hpo.trial.tracing import Origin, TensorStatistics, trace_origins

DENSE = "encoder.encoder.layer.1.output.dense"


def traced(model: MultitaskModel, loss: Callable[[MultitaskModel], Tensor] = scalar_loss) -> Origin | None:
    """What the loss goes back to, or the first gradient from above that is not finite."""
    with trace_origins(model) as tracer:
        with torch.autocast("cpu", torch.float16):
            value = loss(model)
        if not value.isfinite():
            return tracer.origin(value)
        value.backward()
        for parameter in reversed(list(model.parameters())):
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                return tracer.origin(parameter.grad)
    return None


def hooked(change: Callable[[Tensor], Tensor], name: str = DENSE, **settings: bool) -> MultitaskModel:
    model = make_model(**settings)
    model.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: change(output))
    return model


def test_a_sound_model_has_no_origin() -> None:
    model = make_model()
    assert traced(model) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_product_that_overflows(recomputes: bool) -> None:
    model = make_model(gradient_checkpointing=recomputes)
    nn.init.constant_(model.get_submodule(DENSE).weight, 3e4)
    nn.init.constant_(model.get_submodule("encoder.encoder.layer.1.intermediate.dense").bias, 10.0)
    origin = traced(model)
    assert (origin.module, origin.phase, origin.inputs_finite) == (DENSE, "forward", True)
    assert origin.operator == "aten.addmm.default"
    assert [one.dtype for one in origin.inputs] == ["float16"] * 3
    assert origin.inputs[-1].absmax == 3e4
    assert origin.outputs[0].nonfinite_share > 0


def test_a_cast_that_overflows() -> None:
    model = make_model()
    nn.init.constant_(model.get_submodule(DENSE).weight, 1e6)
    origin = traced(model)
    assert (origin.module, origin.operator) == (DENSE, "aten._to_copy.default")
    assert (origin.inputs[0].dtype, origin.outputs[0].dtype) == ("float32", "float16")
    assert origin.inputs[0].absmax == 1e6


@pytest.mark.parametrize("name", [DENSE, "encoder.embeddings", "heads.1.1"])
def test_a_gradient_that_breaks_in_the_backward_pass(name: str) -> None:
    """The square root of zero is fine; its derivative is not."""
    origin = traced(hooked(lambda output: output + (output * 0).sqrt(), name))
    inside = f"{name}." if name == "encoder.embeddings" else name
    assert (origin.module or "").startswith(inside.rstrip("."))
    assert (origin.phase, origin.inputs_finite) == ("backward", True)
    assert origin.inputs[-1].absmax == 0, "0 / 0, or 1 / 0"


def test_what_a_parent_computes_is_not_its_child_s() -> None:
    """Before the child is called: the parent is the one that is named, in the backward pass too."""
    model = make_model()
    output = model.get_submodule("encoder.encoder.layer.1.output")
    forward = output.forward
    output.forward = lambda hidden, residual: forward(hidden + (hidden * 0).sqrt(), residual)
    assert traced(model).module == "encoder.encoder.layer.1.output"


def test_what_is_after_the_logits_is_the_loss() -> None:
    def overflows(model: MultitaskModel) -> Tensor:
        return (
            torch.stack([logits.float().sum() for logits in model(*make_batch()).values()]).sum() * math.inf
        )

    assert traced(make_model(), overflows).module is None
    origin = traced(make_model(), lambda model: (scalar_loss(model) * 0).sqrt())
    assert (origin.module, origin.phase) == (None, "backward")


def test_a_mask_of_minus_infinity_is_no_origin_and_a_row_of_it_is() -> None:
    def mask(keeps: int) -> Callable[[Tensor], Tensor]:
        def change(output: Tensor) -> Tensor:
            hidden = torch.arange(output.shape[-1]) >= keeps
            bias = torch.zeros(output.shape[-1]).masked_fill(hidden, -math.inf)
            return (output + bias).softmax(dim=-1)

        return change

    assert traced(hooked(mask(1))) is None
    origin = traced(hooked(mask(0)))
    assert (origin.module, origin.operator) == (DENSE, "aten._softmax.default")
    assert origin.inputs_finite, "-inf is a mask"


def test_a_weight_that_was_not_finite_before() -> None:
    model = make_model()
    with torch.no_grad():
        model.get_submodule(DENSE).weight[0, 0] = math.nan
    origin = traced(model)
    assert origin.module == DENSE
    assert not origin.inputs_finite


def test_what_is_overwritten_is_forgotten() -> None:
    def overwrite(output: Tensor) -> Tensor:
        broken = torch.full_like(output, math.inf)
        return output + broken.zero_()

    assert traced(hooked(overwrite)) is None


def test_statistics_are_of_what_is_finite() -> None:
    found = TensorStatistics.of(torch.tensor([math.nan, -4.0, 3.0, math.inf], dtype=torch.bfloat16))
    assert found == TensorStatistics((4,), "bfloat16", -4.0, 3.0, 4.0, 0.5)
    assert TensorStatistics.of(torch.tensor([math.nan])).absmax is None
    assert TensorStatistics.of(torch.zeros(0)).nonfinite_share == 0
