"""The weights that tell the formats of products apart."""

import pytest
import torch

from hpo.precision.planted import planted as plant


@pytest.mark.parametrize("shape", [(2,), (8,), (7,), (6, 4), (3, 8, 2)])
def test_planted_weights(shape: tuple[int, ...]) -> None:
    """Their slices cancel out, two slices apart stay for every k, and scales move them."""
    weight, longest = torch.zeros(shape), max(range(len(shape)), key=lambda dim: shape[dim])
    base, changed = plant(weight, None, 1.0), plant(weight, 5, 1.0)
    kept = base.abs() == 1.75
    assert ((base.abs() == 1.5) | kept).all()
    slices = kept.movedim(longest, 0).flatten(1) if len(shape) > 1 else kept[:, None]
    assert sorted(slices.float().mean(1).tolist())[-2:] == ([1, 1] if shape[longest] > 2 else [0, 0])
    assert int(kept.sum()) == int(slices.all(1).sum()) * slices.shape[1]
    assert base.sum(longest).abs().max() == (0 if shape[longest] % 2 == 0 else 1.5)
    assert torch.equal(changed - base, ((base > 0) & ~kept) / 32)
    assert torch.equal(plant(weight, 5, 0.5), changed / 2)
