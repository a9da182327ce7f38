"""How far modules are from fp32, against what can be computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import CPU, EMULATED
from tiny_encoders import make_batch, make_model
from torch import Tensor, nn

from hpo.data.batches import Batch
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS
from hpo.trial.distance import ModuleError, module_errors


def errors(model: MultitaskModel, name: str = "bf16") -> list[ModuleError]:
    ids_BL, mask_BL = make_batch()
    batch = Batch(ids_BL, mask_BL, None, {}, np.arange(len(ids_BL)), mask_BL.sum(1).numpy())
    return module_errors(model, MixedPrecision(PRECISIONS[name], EMULATED, CPU), batch)


@pytest.mark.parametrize("name", ["bf16", "bf16-true", "fp16"])
def test_a_pooler_that_no_logits_depend_on_is_left_out(name: str) -> None:
    model = make_model()
    assert model.get_submodule("encoder.pooler.dense") is not None
    found = [one.module for one in errors(model, name)]
    assert any(module.startswith("encoder.encoder.layer.1.") for module in found)
    assert any(module.startswith("heads.") for module in found)
    assert not [module for module in found if module.startswith("encoder.pooler")]


def test_frozen_modules_count_and_the_model_comes_back_as_it_was() -> None:
    model = make_model()
    model.train()
    whole = errors(model)
    model.encoder.requires_grad_(False)
    assert errors(model) == whole
    assert model.training
    assert not any(weight.requires_grad for weight in model.encoder.parameters())
    assert not any(module._forward_hooks for module in model.modules())


class Counting(nn.Module):
    """Has no output in floating point, as a module that looks up buckets."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.argmax(dim=-1)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0 * self.counting(hidden)[..., None]


def test_a_module_without_floating_point_output_is_passed_over() -> None:
    model = make_model()
    head: Any = model.heads[0]
    head.append(Counted())
    assert "heads.0.2.counting" not in [one.module for one in errors(model)]


def test_the_own_error_is_of_fp32_s_inputs() -> None:
    """Of two errors in a row the second does not count the first."""
    model = make_model().eval()
    head: Any = model.heads[0]
    inputs: list[Tensor] = []
    hook = head[-1].register_forward_hook(lambda _module, args, _output: inputs.append(args[0]))
    found = next(one for one in errors(model) if one.module.startswith("heads.0"))
    hook.remove()
    with torch.no_grad():
        exact = head[-1](inputs[-1].float())
        with torch.autocast("cpu", torch.bfloat16):
            rounded = head[-1](inputs[-1].float())
    expected = float((rounded.double() - exact.double()).norm() / exact.double().norm())
    assert found.own_error == pytest.approx(expected)
    assert found.error > 0
    assert found.kind in ("Linear", "Sequential")
