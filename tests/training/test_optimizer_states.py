"""Moments in fewer bits."""

import pytest
import torch
from support.tiny_loop import parameter_group
from torch import Tensor, nn
from torch.optim import Optimizer

from hpo.training.float32_optimizer import (
    BLOCK,
    SIGNED,
    decode,
    dynamic_fractions,
    encode,
    nearest,
    state_facts,
)
from hpo.training.optim import build_optimizer, optimizer_state_facts

BYTES = {"bf16": 2.0, "int8": 1 + 4 / 256}
SHORT = tuple(BYTES)
LARGEST_ERROR = {"bf16": 0.005, "int8": 0.04}
"""Root mean square of the difference from fp32 after 30 steps of 0.02, which move a weight by 0.6."""
SHAPE, TINY = (64, 128), (4, 4)
ODD = (67, 127)
"""A shape that blocks do not divide."""


def moments(seed: int = 0) -> Tensor:
    """Of seven powers of ten, and zero."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(SHAPE, generator=draw) * torch.logspace(-7, 0, SHAPE[0])[:, None]
    values[3] = 0
    return values


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("name", SIGNED)
def test_error_of_a_stored_moment(kind: str, name: str) -> None:
    moment = moments() if SIGNED[name] else moments().square()
    encoded = encode(moment, name, kind, 1)
    back = decode(encoded, name, kind, moment.shape)
    assert back.dtype == torch.float32
    error = (back - moment).abs()
    if kind == "bf16":  # relative to the number
        assert (error <= moment.abs() * 1.001 / 128).all()
    else:  # relative to the largest of the block: half of the widest gap between two fractions
        largest = moment.view(-1, BLOCK).abs().amax(1, keepdim=True)
        assert (error.view(-1, BLOCK) <= largest * 0.01 + 1e-30).all()
    assert sum(part.nbytes for part in encoded.values()) == pytest.approx(moment.numel() * BYTES[kind])
    assert (back[3] == 0).all(), "a weight without a gradient must not move"


def test_stochastic_rounding_has_the_right_mean() -> None:
    value = torch.full(SHAPE, 1 + 1 / 512)  # a quarter of the way from 1 to the next
    mean = torch.stack([encode(value, "exp_avg", "bf16", seed)["codes"].float() for seed in range(20)]).mean()
    assert float(mean) == pytest.approx(1 + 1 / 512, abs=1e-4)
    one, same, other = (encode(moments(), "exp_avg", "bf16", seed)["codes"] for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_published_tables() -> None:
    signed, unsigned = (dynamic_fractions(signed=one) for one in (True, False))
    assert (len(set(signed)), len(set(unsigned))) == (256, 256)
    assert (signed[-1], unsigned[0], unsigned[-1]) == (1.0, 0.0, 1.0)
    assert min(unsigned[1:]) == pytest.approx(0.325e-6)
    assert sorted(abs(value) for value in signed if value < 0) == [v for v in signed if 0 < v < 1]


@pytest.mark.parametrize("signed", [True, False])
def test_nearest_fraction(signed: bool) -> None:
    table = torch.tensor(dynamic_fractions(signed=signed), dtype=torch.float64)
    drawn = torch.rand(1000, generator=torch.Generator().manual_seed(1)) ** 9
    numbers = torch.cat([table.float(), drawn, -drawn if signed else drawn])
    distances = (numbers.double()[:, None] - table).abs()
    chosen = distances.gather(1, nearest(numbers, signed=signed).long()[:, None]).squeeze(1)
    assert torch.allclose(chosen, distances.amin(dim=1), rtol=0, atol=1e-9)


def run(kind: str, name: str = "adamw", shape: tuple[int, int] = SHAPE) -> tuple[Tensor, Tensor, Optimizer]:
    """A matrix and an embedding after 30 steps towards two targets."""
    draw = torch.Generator().manual_seed(1)
    weight, embedding = (nn.Parameter(torch.randn(shape, generator=draw)) for _ in range(2))
    targets = torch.randn((2, *shape), generator=draw)
    groups = [parameter_group(each, lr=0.02, weight_decay=0.01) for each in (weight, embedding)]
    optimizer = build_optimizer(name, groups, state=kind, fp32_state=[embedding])
    for _ in range(30):
        for parameter, target in zip((weight, embedding), targets, strict=True):
            parameter.grad = parameter.detach() - target
        optimizer.step()
    return weight.detach(), embedding.detach(), optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "num_bytes"), [("adamw", 8), ("lion", 4), ("sgd", 4), ("adafactor", 3 / 2)])
def test_bytes_of_every_optimizer(name: str, num_bytes: float, dtype: torch.dtype) -> None:
    """Adafactor has a number for each row and column."""
    weight = nn.Parameter(torch.ones(4, 8, dtype=dtype))
    optimizer = build_optimizer(name, [parameter_group(weight, lr=0.1)])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    facts = optimizer_state_facts(optimizer, "fp32")
    assert (facts["dtypes"].keys(), facts["bytes"]) == ({"float32"}, num_bytes * weight.numel())


def test_bytes_of_nested_states_of_an_own_optimizer() -> None:
    nested = {"a": torch.ones(2), "n": 3, "step": torch.tensor(3.0)}
    facts = state_facts([{"empty": {}, "nested": nested, "step": 4}])
    assert (facts["dtypes"], facts["bytes"]) == ({"float32": 1}, 8)


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize(
    ("name", "shape"), [("adamw", SHAPE), ("adam", SHAPE), ("lion", SHAPE), ("adamw", ODD), ("adamw", TINY)]
)
def test_steps_are_near_fp32(kind: str, name: str, shape: tuple[int, int]) -> None:
    plain, short = run("fp32", name, shape), run(kind, name, shape)
    assert torch.equal(plain[1], short[1]), "the embedding's state is in fp32"
    error = (short[0] - plain[0]).square().mean().sqrt()
    facts = optimizer_state_facts(short[2], kind)
    if shape == TINY:
        assert (error, facts["requested"], facts["effective"]) == (0, kind, "fp32")
        assert "large enough" in facts["reason"]
        return
    assert 0 < error < LARGEST_ERROR[kind]
    assert (facts["requested"], facts["effective"], facts["reason"]) == (kind, kind, "")
    num_moments, num_elements = 1 if name == "lion" else 2, plain[0].numel()
    if shape != ODD:
        assert facts["fp32_bytes"] == 2 * num_moments * 4 * num_elements
        assert facts["bytes"] == pytest.approx(num_moments * num_elements * (4 + BYTES[kind]))
