"""`hpo.check_precision`: any module, any loss."""

import random
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.tiny import unchanged
from torch import Tensor, nn

import hpo
from hpo.errors import InputError
from hpo.trial.differences import gradient_share, gradient_shares


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


class Wrapped(nn.Module):
    """A linear layer and a function of it and of its input."""

    def __init__(self, function: Any, **attributes: Any) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        for name, value in attributes.items():
            self.register_buffer(name, value) if isinstance(value, Tensor) else setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


GENERATOR = np.random.default_rng(0)


def mixed(model: nn.Module, batch: Tensor) -> Tensor:
    """Mixes rows by the generators of NumPy, Python and the user."""
    share = (np.random.rand() + random.random() + GENERATOR.random()) / 3
    return squares(model, share * batch + (1 - share) * batch[torch.from_numpy(np.random.permutation(8))])


def unseeded(model: nn.Module, batch: Tensor) -> Tensor:
    return squares(model, batch * random.SystemRandom().uniform(-2, 2))


def penalised(model: nn.Module, batch: Tensor) -> Tensor:
    """A penalty of the gradients of the input."""
    inputs = batch.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).float().sum(), inputs, create_graph=True)
    return gradient.float().square().mean()


def of_training(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss that the model gives in training alone, as a detector does."""
    assert model.training
    return squares(model, batch)


def reads(model: Any, x: Tensor) -> Tensor:
    with model.lock:
        return model.linear(x)


OLD_NORMS = (nn.utils.weight_norm, nn.utils.spectral_norm)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-true"])
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: nn.Linear(4, 4), mixed),
        (lambda: nn.Linear(4, 4), penalised),
        (lambda: nn.Linear(4, 4), of_training),
        (lambda: Wrapped(lambda model, x: model.linear(x) + torch.randn_like(model.linear(x))), squares),
        (lambda: Wrapped(lambda model, x: model.linear(x) + model.row, row=torch.randn(4)), squares),
        (lambda: Wrapped(lambda model, x: model.linear(x * model.inv_freq), inv_freq=torch.rand(4)), squares),
        (lambda: Wrapped(reads, lock=threading.Lock()), squares),
        *((lambda norm=norm: nn.Sequential(norm(nn.Linear(4, 4))), squares) for norm in OLD_NORMS),
        (lambda: nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)), squares),
    ],
)
def test_conditions_of_the_check_are_not_blamed_on_a_precision(make: Any, loss: Any, precision: str) -> None:
    rows = torch.randn(8, 4, 4) if isinstance(model := make(), nn.Sequential) else torch.randn(8, 4)
    before = GENERATOR.bit_generator.state, np.random.get_state()[1].tolist(), random.getstate()
    with unchanged(model):
        check = hpo.check_precision(model, loss, rows, precision, repeats=1)
    assert check.verdict == "ok", check
    assert check.costs is not None
    assert check.measurement.reference_repeats
    assert before == (GENERATOR.bit_generator.state, np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_is_unverified_if_fp32_differs_from_itself(precision: str) -> None:
    check = hpo.check_precision(nn.Linear(4, 4), unseeded, torch.randn(8, 4), precision, repeats=1)
    assert check.verdict == "unverified"
    assert "two equal passes in fp32 differ" in check.reasons[0]
    assert "random numbers" in check.reasons[0]


def test_fault_of_the_precision_is_found_beside_random_numbers() -> None:
    def wrong(model: Any, x: Tensor) -> Tensor:
        return model.linear(x) * (-1 if torch.is_autocast_enabled("cpu") else 1)

    check = hpo.check_precision(Wrapped(wrong), mixed, torch.randn(8, 4), "bf16", repeats=1)
    assert check.verdict == "incompatible"


def test_buffer_in_fp32_is_named() -> None:
    def fails(model: Any, x: Tensor) -> Tensor:
        return model.linear(x * model.inv_freq) @ torch.ones(4, 4)

    model = Wrapped(fails, inv_freq=torch.rand(4))
    check = hpo.check_precision(model, squares, torch.randn(8, 4), "bf16-true", repeats=1)
    assert check.verdict == "incompatible"
    assert "buffers in fp32: inv_freq" in check.reasons[0]


def test_numpy_array_under_bf16_weights() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return squares(model, torch.as_tensor(batch["x"]))

    batch = {"x": np.ones((8, 4), np.float32)}
    assert hpo.check_precision(nn.Linear(4, 4), loss, batch, "bf16", repeats=1).verdict == "ok"
    with pytest.raises(InputError, match=r"batch: .* NumPy array of float32, which has no bf16"):
        hpo.check_precision(nn.Linear(4, 4), loss, batch, "bf16-true", repeats=1)


def test_outputs_of_another_shape_are_not_compared() -> None:
    """As many rows as are above a bound."""
    model = Wrapped(lambda model, x: model.linear(x)[model.linear(x)[:, 0] > model.linear(x)[:, 0].median()])
    rows = torch.randn(8, 4)
    assert hpo.check_precision(model, squares, rows, "bf16", repeats=1).verdict in ("ok", "degraded")


class Tagger(nn.Module):
    """A norm of bf16 states, and token types as BERT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.types, self.first = nn.Embedding(2, 16), nn.Linear(16, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, rows: Tensor) -> Tensor:
        types = self.types(torch.zeros(rows.shape[:-1], dtype=torch.long))
        result: Tensor = self.last(self.norm(self.first(rows + types)))
        return result


class Recurrent(nn.Module):
    """A bias that each step adds, so autograd sums as many gradients in the format of the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Linear(16, 16), nn.Parameter(torch.zeros(16))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([one + self.bias for one in self.first(rows).split(1)])


def total(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows).float() - 10).square().sum()


@pytest.mark.parametrize(("precision", "sums"), [("bf16", {"layer_norm"}), ("bf16-true", {"embedding"})])
def test_long_sums_of_a_check_are_in_fp32(precision: str, sums: set[str]) -> None:
    check = hpo.check_precision(Tagger(), total, torch.randn(64, 50, 16), precision, repeats=1)
    assert check.verdict == "ok", check
    assert min(check.measurement.gradient_shares.values()) > 0.98
    assert any(
        "summed in fp32" in reason and sums <= {*re.findall(r"\w+", reason)} for reason in check.reasons
    )


def test_reasons_name_sums_of_this_check_alone() -> None:
    for precision, is_said in (("bf16", True), ("fp32", False)):
        check = hpo.check_precision(Tagger(), total, torch.randn(64, 50, 16), precision, repeats=1)
        assert any("summed in fp32" in reason for reason in check.reasons) == is_said, check.reasons


class BackwardInBf16(torch.autograd.Function):
    """A product in fp32 whose backward pass multiplies in bf16."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, weight, grad = (one.bfloat16() for one in (*ctx.saved_tensors, *gradients))
        return (grad @ weight).float(), (grad.t() @ rows).float()


def test_backward_pass_in_another_format_disagrees() -> None:
    model = Wrapped(lambda model, x: BackwardInBf16.apply(x, model.linear.weight))
    check = hpo.check_precision(model, squares, torch.randn(8, 4), "fp32", repeats=1)
    assert check.measurement.agrees is False
    assert "backward" in check.measurement.disagreement


def test_check_names_a_gradient_with_a_sum_that_stops() -> None:
    check = hpo.check_precision(Recurrent(), total, torch.randn(2000, 16), "bf16-true", repeats=1)
    assert check.verdict == "degraded", check
    assert any(re.search(r"\d+% of bias left", reason) for reason in check.reasons), check


def test_rounding_takes_nothing_off_a_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    exact = torch.randn(1000, generator=draw)
    noisy = exact + torch.randn(1000, generator=draw)
    assert gradient_share(exact.bfloat16().float(), exact) > 0.999
    assert gradient_share(noisy, exact) == 1.0
    assert gradient_share(noisy / 2, exact) < 0.8
    assert gradient_share(torch.randn(1000, generator=draw), 1e-6 * exact) == 1.0  # nothing but noise
    assert gradient_share(0 * exact, exact) == 0.0


def test_gradient_that_is_rounding_alone_has_no_share() -> None:
    """The bias of attention's keys moves all scores alike: its true gradient is 0."""
    exact = {"weight": torch.ones(32), "key.bias": 1e-9 * torch.randn(32)}
    half = {name: 0.5 * one for name, one in exact.items()}
    assert gradient_shares(half, exact) == {"weight": 0.5}
