"""Observation of the real calls in a loop, which stays as it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hpo.precision.observation import Observation
from hpo.precision.observed_loop import ObservedLoop

X, Y = torch.randn(12, 16, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2


def trained(follow: Any) -> list[Tensor]:
    """Train three steps with an evaluation after each; return losses and weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 2))
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    loop = follow(model)
    for _ in range(3):
        loss = F.cross_entropy(model.train()(X), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.detach(), F.cross_entropy(model.eval()(X), Y)]
    if loop:
        loop.close()
    return [*losses, *model.parameters()]


def test_losses_are_those_of_the_plain_loop() -> None:
    modes: list[bool] = []
    seen = Observation()
    observed = trained(lambda model: ObservedLoop(model, seen, modes.append))
    assert all(map(torch.equal, observed, trained(lambda _: None)))
    assert modes == [True, False]
    assert dict(seen.products) == {"0.weight": {"float32"}, "3.weight": {"float32"}}
    assert {phase for phase, *_ in seen.flops} == {"forward", "backward"}
    assert not is_in_torch_dispatch_mode()


def test_another_autocast_is_observed_again() -> None:
    model, seen, modes = nn.Sequential(nn.Linear(16, 2)).eval(), Observation(), list[bool]()
    loop = ObservedLoop(model, seen, modes.append)
    for enabled in (False, True, False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(X)
    assert seen.products == {"0.weight": {"float32", "bfloat16"}}
    with torch.no_grad(), loop.paused(), torch.autocast("cpu", torch.float16):
        model(X)
    loop.close()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        model(X)
    assert modes == [False, False]


@pytest.mark.parametrize("ends", ["close", "paused"])
def test_unfinished_steps_leave_no_mode(ends: str) -> None:
    model, modes = nn.Sequential(nn.Linear(16, 2)), list[bool]()
    loop = ObservedLoop(model, Observation(), modes.append)
    model(X)
    assert is_in_torch_dispatch_mode()
    if ends == "paused":
        with loop.paused():
            assert not is_in_torch_dispatch_mode()
    loop.close()
    assert not is_in_torch_dispatch_mode()
    assert not modes
    assert not model._forward_hooks


def test_compiled_model_is_not_observed() -> None:
    model, modes = nn.Sequential(nn.Linear(16, 2)), list[bool]()
    model[0].compile(backend="eager")
    loop = ObservedLoop(model, Observation(), modes.append)
    loop.begin_step("step")
    model(X)
    assert not is_in_torch_dispatch_mode()
    loop.close()
    assert not modes
