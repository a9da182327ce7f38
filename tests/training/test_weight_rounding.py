"""Rounding of bf16 weights: exact over all bit patterns, against fp32, after a resume."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tiny_loop import train_steps
from torch import Tensor, nn

from hpo.training import optim, weight_rounding
from hpo.training.optim import OPTIMIZERS, Float32Optimizer, build_optimizer
from hpo.training.weight_rounding import random_int16, round_with_bits
from hpo.trial.executor import Executor

ALL_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
UNBIASED = ("stochastic", "compensated")


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    round_with_bits(values.clone(), bits, out)
    return out


def from_words(words: Any) -> Tensor:
    """fp32 numbers of these bit patterns."""
    return torch.from_numpy(np.asarray(words, dtype=np.uint32).view(np.float32))


# One number


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "value",
    [
        *(0.0, 1.0, 0.1, 3.14159, 1 + 2**-8, 1 + 2**-23, 2 - 2**-23, 65504.1, 0.02, 2e-5),
        *(1e-38, 2**-126 - 2**-149, 2**-149, 2**-133, 3 * 2**-134, 9.3e-41),  # subnormal
        *(3.3895313892515355e38, 3.38e38),  # the largest bf16 number, and below
    ],
)
def test_the_mean_over_all_random_bits_is_the_number_itself(value: float, sign: float) -> None:
    number = torch.tensor(sign * value, dtype=torch.float32)
    results, counts = torch.unique(rounded(number.repeat(2**16), ALL_BITS), return_counts=True)
    total = sum(
        Fraction(result) * count
        for result, count in zip(results.double().tolist(), counts.tolist(), strict=True)
    )
    assert total == Fraction(number.item()) * 2**16
    assert len(results) <= 2


def test_every_bf16_number_stays_and_what_lies_between_goes_to_its_neighbours() -> None:
    """The shares are exact: a lower half of n goes up for the n largest of the 65536 random numbers alone."""
    upper = np.arange(2**16, dtype=np.uint32)
    is_finite = (upper & 0x7F80) != 0x7F80
    lowest, highest = torch.full((2**16,), -(2**15)).short(), torch.full((2**16,), 2**15 - 1).short()
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = from_words(upper << 16 | lower)
        down = from_words(upper << 16)
        up = from_words((upper << 16) + 0x10000)  # infinity after the largest
        last_down = torch.full((2**16,), 2**15 - 1 - lower).short()
        first_up = torch.full((2**16,), 2**15 - lower).short() if lower else None
        for bits, expected in ((lowest, down), (last_down, down), (first_up, up), (highest, up)):
            if bits is not None and (lower or expected is down):
                found = rounded(values, bits).float()
                assert torch.equal(found[is_finite], expected[is_finite])
                # A bit pattern, so that -0 stays -0 and subnormal numbers are not taken for 0.
                assert torch.equal(found[is_finite].view(torch.int32), expected[is_finite].view(torch.int32))


def test_infinity_and_nan_stay() -> None:
    inf = torch.tensor([torch.inf, -torch.inf]).repeat_interleave(2**16)
    assert torch.equal(rounded(inf, ALL_BITS.repeat(2)).float(), inf)
    for word in (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF):
        assert rounded(from_words([word]).repeat(2**16), ALL_BITS).isnan().all()


def test_random_bits_are_uniform_and_do_not_depend_on_how_they_are_cut() -> None:
    draw = random_int16((1, 2, 3), torch.device("cpu"))
    whole = random_int16((1, 2, 3), torch.device("cpu"))(2**20)
    pieces = torch.cat([draw(size) for size in (4, 1000, 2**20 - 1004)])
    assert torch.equal(whole, pieces)
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert (whole == random_int16(other, torch.device("cpu"))(2**20)).float().mean() < 1e-4
    counts = torch.bincount(whole.int() + 2**15, minlength=2**16).double()
    chi_square = ((counts - 16) ** 2 / 16).sum().item()
    assert abs(chi_square - 2**16) < 5 * (2 * 2**16) ** 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_rounds_without_bias() -> None:
    values = torch.full((2**22,), 1 + 2**-10, device="cuda")
    out = torch.empty_like(values, dtype=torch.bfloat16)
    round_with_bits(values.clone(), random_int16((1, 2, 3), values.device)(len(values)), out)
    share = (out > 1).double().mean().item()
    assert abs(share - 1 / 8) < 5 * (1 / 8 * 7 / 8 / len(values)) ** 0.5


# In an optimiser


def group(weights: list[nn.Parameter], **options: float) -> dict[str, Any]:
    rate = options.get("lr", 2e-5)
    return {"params": weights, "lr": rate, "initial_lr": rate, "weight_decay": 0.0, **options}


def weights_like_a_models(seed: int = 0, shape: tuple[int, int] = (64, 64)) -> Tensor:
    """N(0, 0.05), as bf16 has them, none so small that an update of 2e-5 is not lost."""
    values = 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(values.abs() < 0.02, 0.02, values).bfloat16()


def run(
    rounding: str,
    name: str = "adamw",
    steps: int = 100,
    dtype: torch.dtype = torch.bfloat16,
    **options: float,
) -> tuple[Tensor, Float32Optimizer]:
    """Steps with gradients of the same sign, which an update of Adam's or Lion's follows; what is stored."""
    weight = nn.Parameter(weights_like_a_models().to(dtype))
    optimizer: Any = build_optimizer(name, [group([weight], **options)], weight_rounding=rounding, seed=3)
    signs = torch.sign(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    for _ in range(steps):
        weight.grad = (signs * options.get("gradient", 1.0)).to(dtype)
        optimizer.step()
    residual = optimizer.residual(weight) if isinstance(optimizer, Float32Optimizer) else None
    stored = weight.detach().float()
    return (stored if residual is None else stored + residual.float()), optimizer


def test_updates_at_a_rate_of_2e5_are_lost_to_nearest_alone() -> None:
    start = weights_like_a_models().float()
    expected = run("nearest", dtype=torch.float32)[0] - start
    assert expected.abs().min() > 1.9e-3  # 100 updates of 2e-5
    assert torch.equal(run("nearest")[0], start)
    compensated = run("compensated")[0] - start
    # What is left out is rounded to bf16 too: 2^-9 of at most 2^-8 of a weight in each step.
    assert ((compensated - expected).abs() <= 100 * 2**-17 * start.abs()).all()
    # Each of the 100 steps rounds, with a variance of at most (gap / 2)^2.
    stochastic = (run("stochastic")[0] - start) * expected.sign()
    gap = 2.0 ** (start.abs().log2().floor() - 7)
    spread = (100 * (gap / 2) ** 2).mean().sqrt() / start.numel() ** 0.5
    assert abs(stochastic.mean() - expected.abs().mean()) < 5 * spread
    assert stochastic.mean() > 20 * spread


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_weight_decay_is_lost_to_nearest_alone(name: str) -> None:
    """Decoupled decay; a gradient of (almost) nothing. Each step takes 1e-4 of a weight."""
    options = {"lr": 1e-2, "weight_decay": 1e-2}

    def decayed(rounding: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        weight = nn.Parameter(weights_like_a_models(shape=(256, 64)).to(dtype))
        optimizer: Any = build_optimizer(name, [group([weight], **options)], weight_rounding=rounding)
        for _ in range(50):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        return weight.detach().float().abs().mean()

    start = weights_like_a_models(shape=(256, 64)).float().abs().mean()
    expected = 1 - decayed("nearest", torch.float32) / start
    assert expected == pytest.approx(5e-3, rel=0.02)
    assert decayed("nearest") == start
    for rounding in UNBIASED:
        assert 1 - decayed(rounding) / start == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("rounding", UNBIASED)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_regression_is_learnt_as_in_fp32(name: str, rounding: str) -> None:
    """By every optimiser, with a rate at which nearest comes nowhere."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((512, 16), generator=generator)
    start = 1 + 0.1 * torch.rand((16, 4), generator=generator).bfloat16().float()
    start = start.bfloat16()
    targets = inputs @ (start.float() + 0.05 * torch.randn((16, 4), generator=generator))
    rates = {"sgd": 1e-3, "adafactor": 5e-4}

    def loss_after(rounding: str, dtype: torch.dtype) -> float:
        weight = nn.Parameter(start.to(dtype))
        options = {"lr": rates.get(name, 5e-4)}
        optimizer = build_optimizer(name, [group([weight], **options)], weight_rounding=rounding)
        for _ in range(150):
            gradient = inputs.T @ (inputs @ weight.detach().float() - targets) / len(inputs)
            weight.grad = gradient.to(dtype)
            optimizer.step()
        return ((inputs @ weight.detach().float() - targets) ** 2).mean().item()

    begin = ((inputs @ start.float() - targets) ** 2).mean().item()
    expected = loss_after("nearest", torch.float32)
    assert expected < 0.5 * begin
    assert loss_after("nearest", torch.bfloat16) > 0.8 * begin
    # bf16 numbers near 1 are 1/128 apart, so that weights keep moving about the best ones.
    assert loss_after(rounding, torch.bfloat16) == pytest.approx(expected, abs=0.05 * begin)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_random_bits_do_not_depend_on_chunks_and_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk, piece in ((2**24, 2**18), (1, 4)):
        monkeypatch.setattr(optim, "CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr(weight_rounding, "PIECE_ELEMENTS", piece)
        weights = [nn.Parameter(weights_like_a_models(seed, (9, 5))) for seed in range(3)]
        optimizer = build_optimizer(name, [group(weights)], weight_rounding="stochastic", seed=5)
        for step in range(4):
            for weight in weights[step % 2 :]:  # one of them has a gradient in half of the steps
                weight.grad = torch.randn(
                    weight.shape, generator=torch.Generator().manual_seed(step)
                ).bfloat16()
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat(weights).detach())
    assert torch.equal(*results)


def test_a_checkpoint_of_before_there_were_roundings_is_taken() -> None:
    weight = nn.Parameter(weights_like_a_models())
    optimizer: Any = build_optimizer("adamw", [group([weight])])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = {key: value for key, value in optimizer.state_dict().items() if key != "rounding"}
    restored: Any = build_optimizer("adamw", [group([nn.Parameter(weights_like_a_models())])])
    restored.load_state_dict(state)
    assert restored.inner.state_dict()["state"][0]["step"] == 1


def tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


@pytest.mark.parametrize(
    ("rounding", "dtype", "expected"),
    [
        ("nearest", torch.bfloat16, 2 + 8),  # bytes a weight: itself, and Adam's two moments
        ("stochastic", torch.bfloat16, 2 + 8),
        ("compensated", torch.bfloat16, 2 + 8 + 2),
        ("nearest", torch.float32, 4 + 8),
    ],
)
def test_bytes_that_a_weight_takes_between_steps(rounding: str, dtype: torch.dtype, expected: int) -> None:
    stored, optimizer = run(rounding, steps=1, dtype=dtype)
    held = tensor_bytes(optimizer.state_dict()) + stored.numel() * torch.empty(0, dtype=dtype).element_size()
    assert held == expected * stored.numel() + 4  # Adam's count of steps


def test_compensation_is_what_rounding_left_out() -> None:
    weight, plain = (
        nn.Parameter(weights_like_a_models().to(kind)) for kind in (torch.bfloat16, torch.float32)
    )
    optimizer: Any = build_optimizer(
        "sgd", [group([weight], lr=1e-3)], betas=(0, 0), weight_rounding="compensated"
    )
    reference = build_optimizer("sgd", [group([plain], lr=1e-3)], betas=(0, 0))
    for step in range(20):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        weight.grad, plain.grad = gradient.clone(), gradient.float()
        optimizer.step()
        reference.step()
    values, residual = weight.detach().double(), optimizer.residual(weight).double()
    assert (residual.abs() <= 2.0 ** (values.abs().log2().floor() - 8)).all()  # half the gap at most
    assert residual.abs().mean() > 2**-11 * values.abs().mean()
    largest = torch.maximum(plain.detach().abs(), weights_like_a_models().float().abs()) + 0.01
    assert ((values + residual - plain.detach()).abs() <= 20 * 2**-17 * largest).all()


# In a trial


def test_a_trial_rounds_as_it_is_told_and_can_be_repeated(executor: Executor) -> None:
    def losses(**params: Any) -> list[float]:
        return train_steps(executor, 6, fp_precision="bf16-true", learning_rate=2e-5, **params).losses

    nearest = losses()
    assert nearest == losses(weight_rounding="nearest")
    stochastic = losses(weight_rounding="stochastic")
    assert stochastic == losses(weight_rounding="stochastic")
    assert len({tuple(nearest), tuple(stochastic), tuple(losses(weight_rounding="compensated"))}) == 3
    fp32 = train_steps(executor, 6, learning_rate=2e-5, weight_rounding="stochastic").losses
    assert fp32 == train_steps(executor, 6, learning_rate=2e-5).losses
