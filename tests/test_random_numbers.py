"""Seeds and states of the random number generators."""

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpo.random_numbers import (
    all_states,
    manual_seed,
    same_random_numbers,
    seed_all,
    set_all_states,
    step_seed,
)

HAS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, HAS_GPU])


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("seed", [0, 2**63 + 1])
def test_seeds_equal_pytorch(device: str, seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.rand(8, device=device)
    torch.manual_seed(7)
    manual_seed(seed)
    assert torch.equal(torch.rand(8, device=device), expected)


def test_states_of_all_generators_in_a_checkpoint(tmp_path: Path) -> None:
    def draws() -> tuple[float, ...]:
        return float(torch.rand(())), float(np.random.rand()), float(np.random.randn()), random.random()

    seed_all(5)
    draws()  # NumPy stores half of a pair of normal numbers
    torch.save(all_states(), tmp_path / "state.pt")
    expected = draws()
    seed_all(6)
    assert draws() != expected
    set_all_states(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draws() == expected
    seed_all(5)
    draws()
    assert draws() == expected


def test_every_step_and_rank_has_its_own_seed() -> None:
    """A CPU's generator uses only the lower 32 bits of a seed."""
    for seed in (0, 42):
        assert len({step_seed(seed, step) % 2**32 for step in range(2 * 10**5)}) == 2 * 10**5
    assert not {step_seed(0, step) for step in range(10**4)} & {step_seed(1, step) for step in range(10**4)}
    assert len({step_seed(42, 7, rank) for rank in range(3)}) == 3
    assert step_seed(42, 7, 0) == step_seed(42, 7) == 8789782607260464961


RNG = np.random.default_rng(0)
HELD = {"torch": torch.Generator(), "python": [random.Random(1)]}


class Owner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old = np.random.RandomState(2)

    def draws(self) -> list[float]:
        inner = lambda: float(RNG.random())  # noqa: E731
        own = float(torch.rand((), generator=HELD["torch"])), HELD["python"][0].random(), self.old.rand()
        return [inner(), *own, float(torch.rand(())), np.random.rand(), random.random()]


@pytest.mark.parametrize("wrapped", [lambda draws: draws, lambda draws: lambda: draws(), functools.partial])
def test_generators_of_an_object_are_restored(wrapped: Any) -> None:
    """As attributes, in globals, in containers, in closures, and in methods."""
    draws = wrapped(Owner().draws)
    found = []
    for _ in range(2):
        with same_random_numbers(draws):
            found.append([draws(), draws()])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
