"""Parameter groups, optimiser steps, and the schedule."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import CPU, EMULATED
from support.tiny_encoders import BERT, make_model
from support.tiny_loop import parameter_group
from torch import Tensor, nn
from torch.optim import Optimizer

from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS
from hpo.training import float32_optimizer
from hpo.training.float32_optimizer import Float32Optimizer
from hpo.training.loop import apply_gradients
from hpo.training.optim import (
    OPTIMIZERS,
    build_optimizer,
    is_fused,
    parameter_groups,
    schedule_factor,
    set_learning_rate,
)


def rates(model: MultitaskModel, **settings: Any) -> dict[str, float]:
    """Learning rate by parameter name."""
    groups = parameter_groups(model, **settings)
    rate_of = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    return {name: rate_of[id(value)] for name, value in model.named_parameters() if id(value) in rate_of}


def test_groups_and_weight_decay() -> None:
    model = make_model(pooling="attention", loss_weighting="uncertainty")
    names = {id(value): name for name, value in model.named_parameters() if value.requires_grad}
    groups = parameter_groups(model, learning_rate=1e-3, weight_decay=0.1)
    by_decay: dict[float, set[str]] = {0.0: set(), 0.1: set()}
    for group in groups:
        by_decay[group["weight_decay"]] |= {names[id(parameter)] for parameter in group["params"]}
    assert all(name.endswith(".weight") and "LayerNorm" not in name for name in by_decay[0.1])
    spared = re.compile(r".*\.bias|.*LayerNorm.*|log_variances.*")
    assert all(spared.fullmatch(name) for name in by_decay[0.0])
    assert by_decay[0.0] | by_decay[0.1] == set(names.values()), "each parameter is in a group"
    assert sum(len(group["params"]) for group in groups) == len(names)
    assert {"heads.0.1.weight", "pool.score.weight"} <= by_decay[0.1]
    assert {"log_variances.0", "heads.0.1.bias"} <= by_decay[0.0]


def test_layerwise_decay() -> None:
    four_layers = {**BERT, "num_hidden_layers": 4}
    model = make_model(four_layers, pooling="attention", loss_weighting="uncertainty")
    found = rates(model, learning_rate=0.1, head_learning_rate=0.3, layerwise_lr_decay=0.5)
    for name, rate in found.items():
        if name.startswith("encoder.embeddings."):
            assert rate == 0.1 * 0.5**4, name
        elif name.startswith("encoder.encoder.layer."):
            layer = int(name.split(".")[3])  # 0 to 3
            assert rate == 0.1 * 0.5 ** (3 - layer), name
        else:
            assert rate == 0.3, name


def gradients_for(shape: tuple[int, ...], steps: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


PLAIN = {
    "adamw": partial(torch.optim.AdamW, betas=(0.8, 0.95)),
    "adam": partial(torch.optim.Adam, betas=(0.8, 0.95)),
    "adafactor": torch.optim.Adafactor,
    "sgd": partial(torch.optim.SGD, momentum=0.8),
}


def plain_steps(name: str, weight: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    """torch's optimiser in fp64 without fused kernels, or the formula of lion."""
    if name != "lion":
        parameter = nn.Parameter(weight.clone())
        optimizer = PLAIN[name]([parameter], lr=lr, weight_decay=decay)
        for gradient in gradients:
            parameter.grad = gradient
            optimizer.step()
        return parameter.detach()
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        update = torch.sign(0.8 * momentum + 0.2 * gradient)
        weight = weight - lr * (update + decay * weight)
        momentum = 0.95 * momentum + 0.05 * gradient
    return weight


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_optimizer_steps_equal_fp64(name: str, weight_decay: float) -> None:
    start, gradients = gradients_for((6, 4), 1)[0], gradients_for((6, 4), 12, seed=2)
    weight = nn.Parameter(start.float())
    optimizer = build_optimizer(
        name, [parameter_group(weight, lr=0.03, weight_decay=weight_decay)], betas=(0.8, 0.95)
    )
    assert is_fused(optimizer) == (name in ("adamw", "adam", "sgd"))
    for gradient in gradients:
        weight.grad = gradient.float()
        optimizer.step()
    expected = plain_steps(name, start, gradients, 0.03, weight_decay)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 0.5, 1.0: 0.0}),
        ("cosine", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.4: 0.5 + 0.5 * math.sqrt(0.5), 0.6: 0.5, 1.0: 0.0}),
        ("constant", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 1.0, 1.0: 1.0}),
    ],
)
def test_schedule_factor(schedule: str, expected: dict[float, float]) -> None:
    for progress, factor in expected.items():
        assert schedule_factor(schedule, progress, 0.2) == pytest.approx(factor, abs=1e-12)
    # At the edges.
    assert schedule_factor(schedule, 0.0, 0.0) == 1.0
    assert schedule_factor(schedule, -0.1, 0.5) == 0.0
    assert schedule_factor(schedule, 1.7, 0.1) == schedule_factor(schedule, 1.0, 0.1)
    assert schedule_factor(schedule, 0.999, 1.0) == 0.999
    assert 0.0 <= schedule_factor(schedule, 1.0, 1.0) <= 1.0


def bf16_step_by_hand(name: str, start: Tensor, gradients: list[Tensor], **options: float) -> Tensor:
    """Step in fp32 and round the weights to bf16 after each step."""
    rounded = nn.Parameter(start.float())
    optimizer = build_optimizer(name, [parameter_group(rounded, **options)])
    for gradient in gradients:
        rounded.grad = gradient.float()
        optimizer.step()
        rounded.data = rounded.data.bfloat16().float()
    return rounded.data.bfloat16()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("chunk_elements", [2**24, 1])
def test_bf16_weights_step_in_fp32(name: str, chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_optimizer, "CHUNK_ELEMENTS", chunk_elements)
    starts = [gradients_for(shape, 1)[0].bfloat16() for shape in ((6, 4), (5, 3))]
    gradients = [[value.bfloat16() for value in gradients_for(start.shape, 20, 2)] for start in starts]
    weights = [nn.Parameter(start.clone()) for start in starts]
    groups = [parameter_group(weights[0], lr=0.02), parameter_group(weights[1], lr=0.05, weight_decay=0.1)]
    optimizer = build_optimizer(name, groups)
    assert isinstance(optimizer, Float32Optimizer)
    assert len(optimizer.chunks) == (1 if chunk_elements > 1 else 2)
    for step in range(20):
        for weight, its_gradients in zip(weights, gradients, strict=True):
            weight.grad = its_gradients[step]
        optimizer.step()
    assert torch.equal(weights[0], bf16_step_by_hand(name, starts[0], gradients[0], lr=0.02))
    expected = bf16_step_by_hand(name, starts[1], gradients[1], lr=0.05, weight_decay=0.1)
    assert torch.equal(weights[1], expected)
    for state in optimizer.inner.state.values():
        assert {value.dtype for value in state.values() if isinstance(value, Tensor)} == {torch.float32}
    stand_ins = [stand_in for chunk in optimizer.chunks for _, stand_in in chunk]
    assert [(stand_in.numel(), stand_in.grad) for stand_in in stand_ins] == [(0, None)] * 2, (
        "no memory is held"
    )


STATES = [*((name, "fp32") for name in OPTIMIZERS), ("adamw", "bf16"), ("adamw", "int8")]
"""Optimisers, and the format of their state."""
SHAPE = (64, 128)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@both_dtypes
@pytest.mark.parametrize(("name", "state"), STATES)
def test_restored_optimizer(name: str, state: str, dtype: torch.dtype, tmp_path: Path) -> None:
    gradients = [value.to(dtype) for value in gradients_for(SHAPE, 10)]

    def make() -> tuple[nn.Parameter, Optimizer]:
        weight = nn.Parameter(torch.ones(SHAPE, dtype=dtype))
        return weight, build_optimizer(
            name, [parameter_group(weight, lr=0.02, weight_decay=0.1)], state=state
        )

    def advance(weight: nn.Parameter, optimizer: Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            set_learning_rate(optimizer, 1 - step / 10)
            weight.grad = gradients[step].clone()
            optimizer.step()

    straight, optimizer = make()
    advance(straight, optimizer, 0, 10)

    before, optimizer = make()
    advance(before, optimizer, 0, 5)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    after, restored = make()
    after.data.copy_(before.data)
    restored.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    advance(after, restored, 5, 10)
    assert torch.equal(after, straight)


@both_dtypes
@pytest.mark.parametrize(("name", "state"), STATES)
@pytest.mark.parametrize("bad_step", [0, 1])
def test_skipped_step_changes_nothing(name: str, state: str, dtype: torch.dtype, bad_step: int) -> None:
    gradients = [value.to(dtype) for value in gradients_for(SHAPE, 3)]
    ends = []
    for is_bad in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 64 * 128).reshape(SHAPE).to(dtype))
        model, groups = nn.ParameterList([weight]), [parameter_group(weight, lr=0.01, weight_decay=0.1)]
        optimizer = build_optimizer(name, groups, state=state)
        amp = MixedPrecision(PRECISIONS["fp32"], EMULATED, CPU)
        for step, gradient in enumerate(gradients):
            if is_bad and step == bad_step:
                weight.grad = torch.full_like(weight, torch.nan)
                apply_gradients(model, optimizer, torch.zeros(()), amp, 1.0)
            weight.grad = gradient.clone()
            apply_gradients(model, optimizer, torch.zeros(()), amp, 1.0)
        ends.append(weight.detach().clone())
        assert amp.statistics().skipped_steps == is_bad
    assert torch.equal(*ends)
