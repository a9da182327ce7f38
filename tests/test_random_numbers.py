from __future__ import annotations

import pytest
import torch

from hpo.random_numbers import manual_seed


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
