"""Weights, followed through the tensors of a forward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.observed_products import products
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hpo.precision.origins import Origins, storage, strided


class Elementwise(nn.Module):
    """Parameters of two dimensions without a product, as in state-space models and relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.gate, self.scale = (nn.Parameter(torch.rand(5, 16)) for _ in range(3))
        self.positions = nn.Embedding(5, 16)
        self.table = nn.Parameter(torch.rand(7, 2))
        self.register_buffer("index", torch.randint(7, (5, 5)))
        self.register_buffer("frequencies", torch.rand(1, 16))
        self.proj = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        state = torch.zeros_like(self.gate)
        for step in hidden:
            state = state * (-self.A_log.float().exp()).exp() + step * self.gate.sigmoid()
        hidden = F.layer_norm(hidden * self.scale + self.positions(torch.arange(5)) + state, (16,))
        with torch.autocast("cpu", enabled=False):
            phases = hidden.float()[..., :1] @ self.frequencies.float()
        bias = self.table[self.index].permute(2, 0, 1)
        heads = self.proj(hidden + phases).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias.to(heads.dtype))


def test_elementwise_parameters_are_no_matrices() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert products(Elementwise(), torch.randn(3, 5, 16)) == {"proj.weight": {"bfloat16"}}


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"w": (16, 16), "two": (2, 16), "row": (1, 16), "stack": (3, 16, 16)}
        shapes |= {"v": (16,), "long": (64,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape), requires_grad=False))
        self.register_buffer("b", torch.randn(16, 16))


class Follow(TorchDispatchMode):
    """Follows the tensors of a model from operator to operator."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.origins = Origins(model)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        written = strided((args[:1] if name.endswith("_") else (), (kwargs or {}).get("out")))
        inputs = strided((args, kwargs))
        self.origins.follow(name.rstrip("_"), inputs, strided(result), written, name in ("mm", "mv"))
        return result


H = torch.randn(4, 16)
IDS = torch.tensor([[0, 1], [2, 0]])
WIDE, MIXED, UNKNOWN = ("w", "float32", 2), ("w", "unmeasured", 2), None


def mixed(m: Any) -> Tensor:
    return m.w + H.mean(0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda m: m.w.t(), ("w", "float64", 2)),
        (lambda m: m.w.half().float(), ("w", "float16", 2)),
        (lambda m: m.w.bfloat16().half(), ("w", "bfloat16", 2)),
        (lambda m: torch.cat([m.w, torch.zeros(2, 16)]), WIDE),
        (lambda m: torch.cat([m.two, m.w]), WIDE),
        (lambda m: torch.cat([m.long, m.two.flatten()]), ("two", "float32", 2)),
        (lambda m: m.w * torch.tensor([[1.0, 2.0]] * 8).view(16), WIDE),
        (lambda m: (-torch.arange(16) * m.w.abs()).exp(), WIDE),
        (lambda m: torch.empty_like(m.w).copy_(m.w), WIDE),
        (lambda m: torch.add(m.w, 1, out=torch.empty(16, 16)), WIDE),
        (lambda m: m.w + H.sum(), WIDE),
        (lambda m: torch.zeros_like(m.w), UNKNOWN),
        (lambda m: m.w @ m.b, WIDE),
        (lambda m: m.w @ m.w, WIDE),
        (lambda m: m.w @ torch.eye(16), ("w", "float32", 0)),
        (lambda m: m.w @ H.T, UNKNOWN),
        (lambda m: mixed(m) @ torch.eye(16), UNKNOWN),
        (mixed, MIXED),
        (lambda m: mixed(m).double().float(), MIXED),
        (lambda m: torch.cat([m.stack[0], mixed(m)]), ("stack", "unmeasured", 3)),
        (lambda m: torch.cat([m.w, H]), MIXED),
        (lambda m: torch.empty(16, 16).copy_(H.mean(0)).add_(m.w), MIXED),
        (lambda m: torch.empty(16, 16).copy_(m.w).add_(H.mean(0)), MIXED),
        (lambda m: m.w.masked_fill(H.mean(0) > 0, 0), MIXED),
        (lambda m: m.w[None] * H[:, None], MIXED),
        (lambda m: m.w[None] * torch.cat([H] * 4)[:, None], UNKNOWN),
        (lambda m: m.two * H.mean(0), ("two", "unmeasured", 2)),
        (lambda m: m.row * H.mean(0), UNKNOWN),
        (lambda m: m.v * H.mean(0), UNKNOWN),
        (lambda m: (m.v * 2).add_(H.mean(0)), UNKNOWN),
        (lambda m: m.v.add_(H.mean(0)), ("v", "float64", 0)),
        (lambda m: F.embedding(IDS[0], m.w), UNKNOWN),
        (lambda m: m.w[IDS], UNKNOWN),
        (lambda m: m.w[IDS[0]], MIXED),
        (lambda m: m.stack[IDS], ("stack", "unmeasured", 3)),
        (lambda m: m.stack.masked_fill((H > 0)[:, None, None].expand(4, 3, 16, 16), 0), UNKNOWN),
        (lambda m: m.stack + H[:, None, None].expand(4, 3, 16, 16), UNKNOWN),
    ],
)
def test_origin_of_a_tensor(make: Callable[[Any], Tensor], expected: tuple[str, str, int] | None) -> None:
    model = Parameters()
    with Follow(model) as followed:
        made = storage(make(model))
    assert followed.origins.weights.get(made) == expected
    assert followed.origins.is_fixed(made) == (expected is not None and expected[1] != "unmeasured")


@pytest.mark.parametrize(
    ("make", "is_fixed"),
    [
        (lambda m: m.b, True),
        (lambda m: m.b * 2, True),
        (lambda m: m.b * torch.ones(16), False),
        (lambda _: torch.ones(16, 16), False),
        (lambda m: m.b * H[0], False),
        (lambda m: (m.b * 2).add_(H[0]), False),
    ],
)
def test_only_buffers_are_fixed_constants(make: Callable[[Any], Tensor], is_fixed: bool) -> None:
    """A state may be zeros at first, and data later."""
    model = Parameters()
    with Follow(model) as followed:
        made = make(model)
        product = storage(model.w @ made)
    assert followed.origins.is_fixed(storage(made)) == is_fixed
    assert followed.origins.weights.get(product, ("", "", 0))[2] == (2 if is_fixed else 0)
