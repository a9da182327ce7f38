"""Weights, followed through the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.observed_products import observed, products
from torch import Tensor, nn
from torch.nn import functional as F


class Elementwise(nn.Module):
    """Parameters of two dimensions without a product, as in state-space models and relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.gate, self.scale = (nn.Parameter(torch.rand(5, 16)) for _ in range(3))
        self.positions = nn.Embedding(5, 16)
        self.table = nn.Parameter(torch.rand(7, 2))
        self.register_buffer("index", torch.randint(7, (5, 5)))
        self.register_buffer("frequencies", torch.rand(16, 1))
        self.proj = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        state = torch.zeros_like(self.gate)
        for step in hidden:
            state = state * (-self.A_log.float().exp()).exp() + step * self.gate.sigmoid()
        hidden = F.layer_norm(hidden * self.scale + self.positions(torch.arange(5)) + state, (16,))
        with torch.autocast("cpu", enabled=False):
            phases = hidden.float() @ self.frequencies.float()
        bias = self.table[self.index].permute(2, 0, 1)
        heads = self.proj(hidden + phases).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias.to(heads.dtype))


class Padded(nn.Module):
    """A new tensor for padded rows, filled with hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        padded = torch.zeros(6, 5, 16)
        padded[: len(inputs)] = inputs
        return self.proj(padded)


@pytest.mark.parametrize("model", [Elementwise, Padded])
def test_elementwise_parameters_and_new_tensors_are_no_matrices(model: type[nn.Module]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert products(model(), torch.randn(3, 5, 16)) == {"proj.weight": {"bfloat16"}}


class Remade(nn.Module):
    """A product under autocast, and one in fp32 with a matrix computed from a weight."""

    def __init__(self, make: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.w, self.make = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16)), make

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.a(inputs)
        with torch.autocast("cpu", enabled=False):
            return F.linear(hidden.float(), self.make(self.w, hidden.float()))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda w, _: torch.cat([w, torch.zeros(2, 16)]), "float32"),
        (lambda w, _: w * torch.ones(16, 16).tril(), "float32"),
        (lambda w, _: w * torch.tensor([[1.0, 2.0]] * 8).view(16), "float32"),
        (lambda w, _: w * torch.ones(()).expand(16, 16), "float32"),
        (lambda w, _: (-torch.arange(16) * w.abs()).exp(), "float32"),
        (lambda w, _: torch.empty(16, 16).copy_(w), "float32"),
        (lambda w, _: torch.empty_like(w).copy_(w), "float32"),
        (lambda w, _: torch.add(w.detach(), 1, out=torch.empty(16, 16)), "float32"),
        (lambda w, _: w @ torch.eye(16), "float32"),
        (lambda w, h: torch.cat([w, h]), "unmeasured"),
        (lambda w, h: (w + h.mean(0)).mul(2).double().float(), "unmeasured"),
        (lambda w, h: (h.mean(0)[None, None] * w)[0], "unmeasured"),
        (lambda w, h: torch.empty(16, 16).copy_(h.mean(0)).add_(w), "unmeasured"),
        (lambda w, h: torch.empty(16, 16).copy_(w).add_(h.mean(0)), "unmeasured"),
        (lambda w, h: w.masked_fill(h.mean(0) > 0, 0), "unmeasured"),
        (lambda w, h: w[h[:, 0].argsort()], "unmeasured"),
    ],
)
def test_matrix_computed_from_a_weight(make: Callable[[Tensor, Tensor], Tensor], expected: str) -> None:
    seen = observed("bf16", Remade(make), torch.randn(4, 16))
    assert seen.products == {"a.weight": {"bfloat16"}, "w": {expected}}
