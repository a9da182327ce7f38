from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from hpo.random_numbers import all_states, manual_seed, seed_all, set_all_states


@pytest.mark.parametrize("seed", [0, 42, 2**63 + 1])
def test_it_seeds_as_pytorch_does(seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.rand(8)
    torch.manual_seed(7)
    manual_seed(seed)
    assert torch.equal(torch.rand(8), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_seeded_too() -> None:
    torch.manual_seed(3)
    expected = torch.rand(8, device="cuda")
    manual_seed(3)
    assert torch.equal(torch.rand(8, device="cuda"), expected)


def test_the_states_of_all_generators_survive_a_checkpoint(tmp_path: Path) -> None:
    def draws() -> tuple[float, ...]:
        return float(torch.rand(())), float(np.random.rand()), float(np.random.randn()), random.random()

    seed_all(5)
    draws()  # NumPy keeps half of a pair of normal numbers
    torch.save(all_states(), tmp_path / "state.pt")
    expected = draws()
    seed_all(6)
    assert draws() != expected
    set_all_states(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draws() == expected
    seed_all(5)
    draws()
    assert draws() == expected
