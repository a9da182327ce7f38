from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hpo.models.dropout import BitDropout, DropoutMaskGenerator, masked, use_bit_dropout

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("p", [1e-9, 1e-4, 0.1, 1 / 3, 0.5, 0.9, 1 - 1e-9])
def test_all_bit_patterns_meet_the_probability(p: float) -> None:
    patterns = np.arange(0x10000, dtype=np.uint16).view(np.uint64)
    generator = DropoutMaskGenerator()
    generator._generator = SimpleNamespace(random_raw=lambda _size: patterns.copy())
    num_dropped = int((generator.keep_mask((0x10000,), p) == 0).sum())
    assert abs(num_dropped / 0x10000 - p) <= 1 / 0x10000


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_values_keep_their_bits_and_dropped_ones_are_zero(dtype: torch.dtype) -> None:
    values = torch.randn(7, 33).to(dtype)
    mask = DropoutMaskGenerator().keep_mask(values.shape, 0.3)
    expected = torch.where(mask == 0, torch.zeros((), dtype=dtype), values)
    assert torch.equal(masked(values, mask), expected)
    assert torch.equal(masked(values.t(), mask.t()), expected.t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_follow_the_kept_values(dtype: torch.dtype) -> None:
    values = torch.randn(64, 64).to(dtype).requires_grad_()
    dropped = BitDropout(0.25)(values)
    assert dropped.dtype == dtype
    kept = dropped != 0
    assert 0.2 < 1 - float(kept.float().mean()) < 0.3
    assert torch.equal(BitDropout(0.25).eval()(values), values)
    torch.testing.assert_close(dropped[kept], (values / 0.75)[kept], rtol=1e-2, atol=0)
    dropped.sum().backward()
    expected = torch.where(kept, 1 / 0.75, 0.0).to(dtype)
    torch.testing.assert_close(values.grad, expected, rtol=1e-2, atol=0)


def test_seed_decides_and_each_call_draws_again() -> None:
    def draw() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [BitDropout(0.5)(torch.ones(1000)) for _ in range(2)]

    first, again = draw(), draw()
    assert all(map(torch.equal, first, again))
    assert not torch.equal(*first)
    torch.manual_seed(3)
    assert not torch.equal(nn.Dropout(0.5)(torch.ones(1000)), first[0]), "masks from bits, not PyTorch's"


def test_use_bit_dropout_replaces_every_plain_dropout() -> None:
    class Other(nn.Dropout):
        pass

    model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2)), Other(0.3))
    use_bit_dropout(model)
    found = [(type(one), one.p) for one in model.modules() if isinstance(one, nn.Dropout)]
    assert found == [(BitDropout, 0.1), (BitDropout, 0.2), (Other, 0.3)]
