"""Parameter groups, optimiser steps, and the schedule."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import amp_of
from support.tiny_encoders import BERT, make_model
from support.tiny_loop import parameter_group
from torch import Tensor, nn
from torch.optim import Optimizer

from hpo import extensions
from hpo.errors import ModelError
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


def test_groups_and_weight_decay() -> None:
    model = make_model(pooling="attention", loss_weighting="uncertainty")
    names = {id(value): name for name, value in model.named_parameters() if value.requires_grad}
    groups = parameter_groups(model, learning_rate=1e-3, weight_decay=0.1)
    by_decay: dict[float, list[str]] = {0.0: [], 0.1: []}
    for group in groups:
        by_decay[group["weight_decay"]] += [names[id(parameter)] for parameter in group["params"]]
    assert all(name.endswith(".weight") and "LayerNorm" not in name for name in by_decay[0.1])
    spared = re.compile(r".*\.bias|.*LayerNorm.*|log_variances.*")
    assert all(spared.fullmatch(name) for name in by_decay[0.0])
    assert sorted(by_decay[0.0] + by_decay[0.1]) == sorted(names.values()), "each parameter is in one group"


def test_layerwise_decay() -> None:
    model = make_model({**BERT, "num_hidden_layers": 4}, pooling="attention", loss_weighting="uncertainty")
    names = {id(value): name for name, value in model.named_parameters()}
    rates = {"learning_rate": 0.1, "head_learning_rate": 0.3, "layerwise_lr_decay": 0.5}
    for group in parameter_groups(model, **rates):
        for name in (names[id(value)] for value in group["params"]):
            depth = -1 if name.startswith("encoder.embeddings.") else 4
            depth = int(name.split(".")[3]) if name.startswith("encoder.encoder.layer.") else depth
            assert group["lr"] == (0.3 if depth == 4 else 0.1 * 0.5 ** (3 - depth)), name
    albert = make_model({**BERT, "model_type": "albert", "embedding_size": 16})
    with pytest.raises(ModelError, match="layerwise_lr_decay at 1"):
        parameter_groups(albert, learning_rate=1.0, layerwise_lr_decay=0.9)


def gradients_for(shape: tuple[int, ...], steps: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


PLAIN = {
    "adamw": partial(torch.optim.AdamW, betas=(0.8, 0.95)),
    "adam": partial(torch.optim.Adam, betas=(0.8, 0.95)),
    "adafactor": torch.optim.Adafactor,
    "sgd": partial(torch.optim.SGD, momentum=0.8),
}


def steps_of(optimizer: Optimizer, gradients: list[Tensor]) -> Tensor:
    """Return the first weight of an optimiser after these steps."""
    weight: Tensor = optimizer.param_groups[0]["params"][0]
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return weight.detach()


def plain_steps(name: str, weight: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    """torch's optimiser in fp64 without fused kernels, or the formula of lion."""
    if name != "lion":
        return steps_of(PLAIN[name]([nn.Parameter(weight.clone())], lr=lr, weight_decay=decay), gradients)
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
    group = parameter_group(nn.Parameter(start.float()), lr=0.03, weight_decay=weight_decay)
    optimizer = build_optimizer(name, [group], betas=(0.8, 0.95))
    assert is_fused(optimizer) == (name in ("adamw", "adam", "sgd"))
    expected = plain_steps(name, start, gradients, 0.03, weight_decay)
    torch.testing.assert_close(steps_of(optimizer, gradients).double(), expected, rtol=2e-5, atol=2e-6)


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
    rates: list[dict[str, float]] = [{"lr": 0.02}, {"lr": 0.05, "weight_decay": 0.1}]
    groups = [parameter_group(weight, **rate) for weight, rate in zip(weights, rates, strict=True)]
    wide, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = build_optimizer(name, [*groups, parameter_group(wide, unused)])
    assert isinstance(optimizer, Float32Optimizer)
    for step in range(20):
        for weight, its_gradients in zip(weights, gradients, strict=True):
            weight.grad = its_gradients[step]
        optimizer.step()
    for weight, *case in zip(weights, starts, gradients, rates, strict=True):
        assert torch.equal(weight, bf16_step_by_hand(name, case[0], case[1], **case[2]))
    assert torch.equal(unused, torch.ones_like(unused))
    for state in optimizer.inner.state.values():
        assert {value.dtype for value in state.values() if isinstance(value, Tensor)} <= {torch.float32}
    stand_ins = [stand_in for chunk in optimizer.chunks for _, stand_in in chunk]
    assert {(each.numel(), each.grad) for each in stand_ins} == {(0, None)}, "no memory is held"


class SignOfAll(Optimizer):
    """Steps by the sign of the sum of all gradients, from a copy of the first weights."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})
        self.weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight in self.weights:
            self.state[weight] = {"first": weight.detach().clone(), "moved": torch.zeros(())}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        stepped = [weight for weight in self.weights if weight.grad is not None]
        sign = torch.stack([weight.grad.sum() for weight in stepped]).sum().sign()
        for weight in stepped:
            moved = self.state[weight]["moved"].add_(sign, alpha=-0.5)
            weight.copy_(self.state[weight]["first"] + moved)


@pytest.mark.parametrize("make", [SignOfAll, torch.optim.Adagrad])
def test_own_optimizer_sees_all_bf16_weights(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_optimizer, "CHUNK_ELEMENTS", 1)
    monkeypatch.setitem(extensions.OPTIMIZERS, "own", extensions.Extension(lambda groups, _: make(groups)))
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        weights = [nn.Parameter(torch.full((4,), value, dtype=dtype)) for value in (1.0, 2.0)]
        optimizer = build_optimizer("own", [parameter_group(*weights, lr=0.5)])
        for _ in range(3):
            for weight, gradient in zip(weights, (1.0, -3.0), strict=True):
                weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
        ends.append(torch.cat([weight.detach().float() for weight in weights]))
    torch.testing.assert_close(*ends, rtol=0.01, atol=0)


STATES = [*((name, "fp32") for name in OPTIMIZERS), ("adamw", "bf16"), ("adamw", "int8")]
"""Optimisers, and the format of their state."""
SHAPE = (64, 128)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@both_dtypes
@pytest.mark.parametrize(("name", "state"), STATES)
def test_restored_optimizer(name: str, state: str, dtype: torch.dtype, tmp_path: Path) -> None:
    gradients = [value.to(dtype) for value in gradients_for(SHAPE, 10)]

    def run(start: Tensor, steps: range, stored: Any = None) -> tuple[nn.Parameter, Optimizer]:
        weight = nn.Parameter(start.clone())
        optimizer = build_optimizer(name, [parameter_group(weight, lr=0.02, weight_decay=0.1)], state=state)
        if stored:
            optimizer.load_state_dict(stored)
        for step in steps:
            set_learning_rate(optimizer, 1 - step / 10)
            weight.grad = gradients[step].clone()
            optimizer.step()
        return weight, optimizer

    ones = torch.ones(SHAPE, dtype=dtype)
    straight, _ = run(ones, range(10))
    before, optimizer = run(ones, range(5))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    stored = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    after, _ = run(before.data, range(5, 10), stored)
    assert torch.equal(after, straight)


@both_dtypes
@pytest.mark.parametrize(("name", "state"), STATES)
@pytest.mark.parametrize("bad_step", [0, 1])
def test_skipped_step_changes_nothing(name: str, state: str, dtype: torch.dtype, bad_step: int) -> None:
    gradients = [value.to(dtype) for value in gradients_for(SHAPE, 3)]
    ends = []
    for is_bad in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 64 * 128).reshape(SHAPE).to(dtype))
        groups = [parameter_group(weight, lr=0.01, weight_decay=0.1)]
        optimizer = build_optimizer(name, groups, state=state)
        amp = amp_of("fp32")
        for step, gradient in enumerate(gradients):
            if is_bad and step == bad_step:
                weight.grad = torch.full_like(weight, torch.nan)
                apply_gradients([weight], optimizer, torch.zeros(()), amp, 1.0)
            weight.grad = gradient.clone()
            apply_gradients([weight], optimizer, torch.zeros(()), amp, 1.0)
        ends.append(weight.detach().clone())
        assert amp.statistics().skipped_steps == is_bad
    assert torch.equal(*ends)
