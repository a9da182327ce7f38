"""`hpo.check_precision`: any module, any loss."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny import unchanged
from torch import Tensor, nn

import hpo
from hpo.errors import InputError


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Any:
        hidden = self.drop(F.relu(self.norm(self.first(images))))
        return {"logits": self.last(hidden.mean((2, 3)))}


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0])["logits"], batch[1])


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, 8, 8), torch.randint(4, (6,))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_convnet_computes_in_the_requested_precision(precision: str) -> None:
    model = ConvNet().train()
    with unchanged(model):
        check = hpo.check_precision(model, cross_entropy, images(), precision)
    assert check.verdict == "ok", check
    found = check.measurement
    assert found.observed["linear_products"] == {"bfloat16": 2}
    assert 1e-5 < found.logits_relative_error["output['logits']"] < 0.05
    assert found.gradient_cosine is not None
    assert 0.99 < found.gradient_cosine < 1.0
    assert check.costs is not None
    assert f"{precision}: ok" in str(check)


@pytest.mark.parametrize(
    ("model", "loss", "precision", "said"),
    [
        (ConvNet(), cross_entropy, "bf61", r"precision: .*bf61.*"),
        (ConvNet(), cross_entropy, "fp8", "`fp8` needs CUDA"),
        (ConvNet().bfloat16(), cross_entropy, "bf16", r"there are 6 in torch.bfloat16. transformers loads"),
        (nn.Identity(), cross_entropy, "bf16", "got no weights"),
        (len, cross_entropy, "bf16", "must be a torch.nn.Module, but got a builtin_function_or_method"),
        (ConvNet(), lambda model, batch: model(batch[0])["logits"], "bf16", "must give a scalar tensor"),
        (ConvNet(), lambda _model, _batch: torch.tensor(1.0), "bf16", "depends on the model's weights"),
    ],
)
def test_invalid_arguments(model: Any, loss: Any, precision: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        hpo.check_precision(model, loss, images(), precision)


def test_batch_norm_uses_the_statistics_of_the_batch() -> None:
    """With fresh running statistics nothing is normalised. A model called in parts has only its loss."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16))]
    model = nn.Sequential(nn.Sequential(*layers)).train()
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=10)
    rows = torch.randn(8, 16)
    with unchanged(model):
        check = hpo.check_precision(model, lambda model, batch: model[0](batch).square().mean(), rows, "fp16")
    assert check.measurement.finite, check
    assert [*check.measurement.logits_relative_error] == ["loss"]
