"""The conditions of a check, and that they end with it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpo.precision.conditions import SameDraws, training_without_dropout, unchanged


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.drop_path, self.lock, self.seen = 0.3, threading.Lock(), [1]
        self.register_buffer("row", torch.ones(1).expand(4))

    def forward(self, x: Tensor) -> Any:
        self.seen.append(2)
        self.cache = self.drop(self.norm(self.first(x))) + self.row
        return self.cache, F.dropout(x, self.drop_path, self.training)


def test_model_is_unchanged_after_conversion_and_calls() -> None:
    model = Net()
    weights, norm = list(model.parameters()), model.norm
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with unchanged(model):
        model.bfloat16()(torch.randn(8, 4).bfloat16())
        model.first, model.norm.__class__ = nn.Linear(1, 1), nn.BatchNorm2d
        model.register_forward_hook(lambda *_: None)
        model.eval()
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    after = model.state_dict()
    assert all(value.dtype == before[name].dtype for name, value in after.items())
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert (model.training, model.seen, hasattr(model, "cache"), type(norm)) == (
        True,
        [1],
        False,
        nn.BatchNorm1d,
    )
    assert not model._forward_hooks


@pytest.mark.parametrize("training", [True, False])
def test_modules_train_without_dropout(training: bool) -> None:
    model, x = Net().train(training), torch.randn(8, 4)
    with training_without_dropout(model):
        assert model.norm.training
        output, rest = model(x)
        expected = F.batch_norm(model.first(x), None, None, model.norm.weight, model.norm.bias, True) + 1
        torch.testing.assert_close(output, expected)
        assert torch.equal(rest, x)
        output.sum().backward()
    assert (model.training, model.drop.p, model.drop_path) == (training, 0.5, 0.3)
    assert model.first.weight.grad is None
    model.norm.eval()
    with training_without_dropout(model.train(True)):
        pass
    frozen = Net()
    frozen.norm.eval()
    with training_without_dropout(frozen):
        assert not frozen.norm.training


DRAWS: list[Callable[[torch.dtype], Tensor]] = [
    lambda dtype: torch.randn(99, dtype=dtype),
    lambda dtype: torch.rand_like(torch.ones(99, dtype=dtype)),
    lambda dtype: torch.randn_like(torch.ones(99), dtype=dtype),
    lambda dtype: torch.empty(99, dtype=dtype).uniform_(),
    lambda dtype: torch.empty(99, dtype=dtype).normal_(2.0, 3.0),
    lambda dtype: torch.normal(torch.zeros(99, dtype=dtype), torch.ones(99, dtype=dtype)),
    lambda dtype: torch.bernoulli(torch.full((99,), 0.5, dtype=dtype)),
    lambda dtype: F.dropout(torch.ones(99, dtype=dtype), 0.5),
]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_draws_are_those_of_fp32(draw: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    expected = draw(torch.float32)
    torch.manual_seed(0)
    with SameDraws():
        drawn = draw(dtype)
    assert drawn.dtype == dtype
    torch.testing.assert_close(drawn.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert (drawn.float().abs() <= expected.abs()).all()
