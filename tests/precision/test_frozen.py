"""Frozen weights stored in fewer bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.observed_products import products
from torch import Tensor, nn

from hpo.precision.amp import prepare_model
from hpo.precision.frozen import STORAGE_DTYPES, FrozenLinear, storage_facts, store_frozen
from hpo.precision.table import PRECISIONS

KINDS = ["bf16", "int8", "nf4"]


def linear(in_features: int = 96, out_features: int = 40, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("shape", [(96, 40), (33, 7)])
def test_rounding_of_int8_and_bf16(shape: tuple[int, int]) -> None:
    plain = linear(*shape)
    plain.weight.data[0] *= 1000
    plain.weight.data[-1] = 0.0
    stored = FrozenLinear(plain, "int8")
    step = plain.weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((stored.weight - plain.weight).abs() <= 0.5001 * step).all()
    assert stored.stored.dtype == torch.int8
    assert torch.equal(FrozenLinear(plain, "bf16").weight, plain.weight.bfloat16().float())


def test_nf4_equals_bitsandbytes() -> None:
    from bitsandbytes.nn import Linear4bit

    plain = linear(64, 32)
    theirs = Linear4bit(64, 32, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=False)
    theirs.load_state_dict(plain.state_dict())
    x = torch.randn(5, 64)
    torch.testing.assert_close(FrozenLinear(plain, "nf4")(x), theirs.to("cpu")(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_product_with_decoded_weights(kind: str, autocast: torch.dtype | None, bias: bool) -> None:
    stored = FrozenLinear(linear(bias=bias), kind)
    plain = stored.linear()
    results = []
    for layer in (stored, plain):
        torch.manual_seed(1)
        x = torch.randn(3, 5, 96, requires_grad=True)
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            y = layer(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        results.append((y, x.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_backward_pass_keeps_no_decoded_copy() -> None:
    stored = FrozenLinear(linear(512, 512), "int8")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        stored(torch.randn(2, 512, requires_grad=True))
    assert sum(one.nbytes for one in kept) < 1.1 * 512 * 512


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own tracing
@pytest.mark.parametrize("kind", KINDS)
def test_compilation_in_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    stored = FrozenLinear(linear(), kind)
    compiled = torch.compile(stored, fullgraph=True, backend="aot_eager")
    x, other = (torch.ones(3, 96, requires_grad=True) for _ in range(2))
    (stored(x).sum() + compiled(other).sum()).backward()
    assert torch.equal(compiled(x), stored(x))
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 96).requires_grad_(False)
        self.frozen = linear()
        self.norm = nn.LayerNorm(40).requires_grad_(False)
        self.head = nn.Linear(40, 2)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.norm(self.frozen(self.embedding(ids))))


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-true"])
@pytest.mark.parametrize("kind", KINDS)
def test_trained_weights_stay(kind: str, name: str) -> None:
    precision = PRECISIONS[name]
    model = prepare_model(Model(), replace(precision, frozen=kind))
    weights, ids = getattr(torch, precision.weights), torch.arange(6)[None]
    assert isinstance(model.frozen, FrozenLinear)
    assert model.head.weight.dtype == model.norm.weight.dtype == model.embedding(ids).dtype == weights
    assert model.embedding.weight.dtype == torch.bfloat16
    before = storage_facts(model)
    assert before["storage_dtypes"] == {STORAGE_DTYPES[kind]: 1}
    bits = {"bf16": 16, "int8": 8 + 32 / 96, "nf4": 4 + 32 / 64}[kind]
    assert before["bits_per_weight"] == round(bits, 3)
    trained = 3 * 40 * model.norm.weight.itemsize + 82 * model.head.weight.itemsize
    assert before["weights_bytes"] == pytest.approx(96 * 40 * bits / 8 + 2 * 50 * 96 + trained)
    assert storage_facts(model.head)["bits_per_weight"] is None, "it is trained"
    prepare_model(model, precision)
    prepare_model(model, replace(precision, frozen=kind))
    assert storage_facts(model) == before, "a second time changes nothing"
    model(ids).sum().backward()
    named = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert named == {"head.weight", "head.bias"}


def test_frozen_matrices_of_experts_count() -> None:
    model = nn.Module()
    model.linear, model.experts = nn.Linear(96, 40), nn.Parameter(torch.zeros(4, 40, 96))
    model.requires_grad_(False)
    store_frozen(model, "int8", torch.float32)
    facts = storage_facts(model)
    assert facts["storage_dtypes"] == {"int8": 1, "float32": 1}
    assert facts["bits_per_weight"] == round((8 + 32 / 96 + 4 * 32) / 5, 3)


class InLess(FrozenLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).to(x.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_measured_not_storage(kind: str) -> None:
    x = torch.randn(4, 96)
    model = nn.Sequential(linear(), nn.Linear(40, 2))
    store_frozen(model, kind, torch.float32)
    layer = model[0]
    before = layer(x)
    assert products(layer, x) == {"stored": {"float32"}}
    assert products(InLess(linear(), kind), x) == {"stored": {"bfloat16"}}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert products(layer, x) == {"stored": {"bfloat16"}}
    assert torch.equal(layer(x), before)
