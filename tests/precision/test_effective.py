"""The formats of a model's products, and models with other products than they declare."""

import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import observed_products as planted
from support.observed_products import Library, Round, WithOwn, as_dtype, observed, plain, products, unrounded
from support.tiny import EMULATED, tiny_batch, tiny_model, unchanged
from support.tiny_encoders import BERT, FAMILIES, TASKS, make_batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from transformers.pytorch_utils import Conv1D

from hpo.models.encoder import load_encoder
from hpo.models.multitask import HeadSettings, MultitaskModel
from hpo.precision.amp import backend_flags, prepare_model
from hpo.precision.observation import COMPILED, Observation
from hpo.precision.table import PRECISIONS


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (unrounded, "float32"),
        (planted.to_tf32, "tf32"),
        (as_dtype(torch.float16), "float16"),
        (as_dtype(torch.bfloat16), "bfloat16"),
        (planted.to_float8(torch.float8_e4m3fn), "float8"),
        (planted.to_float8(torch.float8_e5m2), "float8"),
        (torch.zeros_like, "unmeasured"),
    ],
)
@pytest.mark.parametrize("sizes", [(3, 1), (64, 7), (384, 1536)])
def test_formats_by_their_rounding(rounding: Round, expected: str, sizes: tuple[int, int]) -> None:
    with Library(rounding):
        assert products(nn.Linear(*sizes), torch.randn(4, sizes[0])) == {"weight": {expected}}


class AsAttention(nn.MultiheadAttention):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden, hidden, hidden)


class Factored(nn.Linear):
    """The weight is a sum with a product of two weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight + 2 * (self.weight.T @ self.weight))


class LearnedQuery(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        queries = self.weight.expand(len(inputs), -1, -1)
        return F.scaled_dot_product_attention(queries, inputs, inputs)


class Tied(nn.Module):
    """A table with a lookup, and an output without autocast; an expert without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense, self.idle = nn.Embedding(9, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.dense(looked_up(self.table.weight, ids) + self.table(ids))
        self.idle(hidden[:0])
        with torch.autocast("cpu", enabled=False):
            return F.linear(hidden.float(), self.table.weight).bfloat16()


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: nn.Linear(16, 1, bias=False), {"weight"}),
        (lambda: nn.Linear(16, 3), {"weight"}),
        (lambda: Conv1D(32, 16), {"weight"}),
        (lambda: nn.Conv1d(5, 5, 3, padding=1, groups=5), {"weight"}),
        (lambda: AsAttention(16, 2, batch_first=True), {"in_proj_weight", "out_proj.weight"}),
        (lambda: Factored(16, 16), {"weight"}),
        (lambda: LearnedQuery(16, 3), {"weight"}),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)), None),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4)), None),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_every_kind_of_product(build: Any, names: set[str] | None, dtype: torch.dtype | None) -> None:
    module = build()
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.constant_(parameter, 3e4)  # would hide a fraction of 2^-12, if it counted
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        formats = products(module, torch.randn(2, 5, 16))
    assert set.union(*formats.values()) == {str(dtype or torch.float32).removeprefix("torch.")}
    assert names in (None, formats.keys())


class CompiledPart(nn.Module):
    """A function compiled by the model itself, and flex attention, one whole operator."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 16)
        part = lambda hidden: self.dense(hidden).relu()  # noqa: E731
        self.part = torch.compile(part, backend="aot_eager", fullgraph=True)

    def forward(self, hidden: Tensor) -> Any:
        heads = self.part(hidden)[:, None]
        return flex_attention(heads, heads, heads, score_mod=lambda score, *_: score / 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_compiled_parts_are_observed_eagerly() -> None:
    torch._dynamo.reset()
    model, hidden = CompiledPart(), torch.randn(2, 8, 16)
    expected = {"dense.weight": {"float32"}}
    assert products(model, hidden) == expected
    model.part(hidden)
    assert products(model, hidden) == expected, "compiled before"


@torch.library.custom_op("hpo_tests::opaque", mutates_args=())
def opaque(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.from_numpy(hidden.numpy() @ weight.numpy())


@torch.library.custom_op("hpo_tests::fused", mutates_args=())
def fused(hidden: Tensor, bias: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    return hidden @ weight * gain + bias


def test_unmeasured_products() -> None:
    """In a library of others, with results that are not finite, or with data in the weight."""
    linear, hidden = nn.Linear(16, 16), torch.randn(2, 16)
    lstm = nn.LSTM(16, 16)
    nn.init.constant_(lstm.weight_hh_l0, torch.nan)
    formats = products(lstm, torch.randn(2, 5, 16))
    assert formats == {"weight_ih_l0": {"unmeasured"}, "weight_hh_l0": {"float32"}}
    for forward in (
        lambda inputs: opaque(inputs, linear.weight),
        lambda inputs: F.linear(inputs, linear.weight + inputs.mean(0)),
    ):
        linear.forward = forward
        assert products(linear, hidden) == {"weight": {"unmeasured"}}


@torch.no_grad()
def test_one_kernel_is_measured_once() -> None:
    roundings = [Mock(side_effect=unrounded) for _ in range(2)]
    for rounding, number in zip(roundings, (1, 3), strict=True):
        with Library(rounding):
            products(nn.Sequential(*(nn.Linear(8, 8) for _ in range(number))), torch.ones(2, 8))
    one, three = (rounding.call_count for rounding in roundings)
    assert three == one + 2 * 2, "a product rounds two matrices"


@torch.library.custom_op("hpo_tests::looked_up", mutates_args=())
def looked_up(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def test_products_without_autocast_or_rows() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        formats = products(Tied(), torch.arange(6).view(2, 3))
    assert formats == {"dense.weight": {"bfloat16"}, "table.weight": {"float32"}}
    assert products(nn.LSTM(16, 16), torch.randn(2, 5, 16)).keys() == {"weight_ih_l0", "weight_hh_l0"}
    assert products(nn.Linear(16, 4).double(), torch.randn(2, 16).double()) == {"weight": {"float64"}}


def test_unmeasured_products_are_unverified() -> None:
    model = nn.Sequential(nn.Linear(8, 8))

    def refuse(values: Tensor) -> Tensor:
        """Like an operator for one packed weight."""
        if values.shape == (8, 8) and values.data_ptr() != model[0].weight.data_ptr():
            raise ValueError("only for other weights")
        return values

    with Library(refuse):
        seen = observed("fp32", model, torch.randn(2, 8))
    message = "The products of 1 of 1 weights could not be measured: 0.weight."
    assert seen.agreement(PRECISIONS["fp32"]) == (None, message)
    seen = observed("fp32", nn.Embedding(9, 4), torch.arange(3))
    assert seen.agreement(PRECISIONS["fp32"]) == (None, "No product with a weight was seen.")


@pytest.mark.parametrize(("count", "more"), [(3, ""), (5, " and 2 more")])
def test_a_reason_names_three_weights(count: int, more: str) -> None:
    seen = Observation()
    for number in range(count):
        seen.products[f"layer.{number}"].add("float32")
    named = "layer.0 (float32), layer.1 (float32), layer.2 (float32)"
    said = f"{count} of {count} weights were not multiplied in bfloat16: {named}{more}."
    assert seen.agreement(PRECISIONS["bf16"]).reason == said


@pytest.mark.parametrize(
    ("rounding", "least_rows", "agrees", "reason"),
    [
        (unrounded, 0, None, "no product was seen to use it"),
        (planted.to_tf32, 100, None, "no product was seen to use it"),
        (planted.to_tf32, 20, True, "^$"),  # the heads have fewer rows and stay in fp32
        (as_dtype(torch.bfloat16), 20, False, r"not multiplied in tf32: encoder.dense.weight \(bfloat16\)"),
    ],
)
def test_tf32_must_be_used(rounding: Round, least_rows: int, agrees: bool | None, reason: str) -> None:
    batch, precision = tiny_batch(), PRECISIONS["tf32"]
    with Library(rounding, least_rows), backend_flags(precision, EMULATED):
        seen = observed("tf32", tiny_model(), batch.input_ids_BL, batch.attention_mask_BL)
        agreement = seen.agreement(precision)
    assert agreement.agrees is agrees
    assert re.search(reason, agreement.reason)
    seen.tf32 = False  # as on a GPU
    assert seen.agreement(precision) == (False, "TF32 is off.") or agrees is False


@pytest.mark.parametrize(
    ("compute", "name", "reason"),
    [
        (plain, "bf16", ""),
        (planted.wide_in_training, "bf16", "in bfloat16: encoder.own.weight (float32)."),
        (planted.wide_in_evaluation, "bf16", "encoder.own.weight (float32)."),
        (planted.rounded_first, "fp32", "1 of 6 weights were not multiplied in float32: encoder.own.weight"),
    ],
)
def test_hidden_formats(compute: planted.Compute, name: str, reason: str) -> None:
    batch = tiny_batch()
    seen = observed(name, tiny_model(WithOwn(compute)), batch.input_ids_BL, batch.attention_mask_BL)
    agreement = seen.agreement(PRECISIONS[name])
    assert (agreement.agrees, reason in agreement.reason) == (not reason, True)
    formats = seen.telemetry()["linear_products"]
    assert (sum(formats.values()), len(formats) == 1) == (6, not reason)


@pytest.mark.parametrize("wraps", [False, True])
def test_module_compiled_by_other_code_is_unverified(wraps: bool) -> None:
    """Its operators are seen only if they run uncompiled."""
    batch, model = tiny_batch(), tiny_model()
    if wraps:
        model.heads[0] = torch.compile(model.heads[0], backend="eager")
    else:
        model.heads[0].compile(backend="eager")
    seen = observed("bf16", model, batch.input_ids_BL, batch.attention_mask_BL)
    assert seen.agreement(PRECISIONS["bf16"]) == (None, COMPILED)
    assert seen.telemetry()["compiled"]


@pytest.mark.parametrize("name", ["bf16", "bf16-true"])
def test_observation_leaves_the_model_unchanged(name: str) -> None:
    batch, model = tiny_batch(), tiny_model(WithOwn(plain))
    prepare_model(model, PRECISIONS[name])
    model.encoder.own.eval()
    generator = torch.get_rng_state()
    with unchanged(model):
        observed(name, model, batch.input_ids_BL, batch.attention_mask_BL)
    assert torch.equal(torch.get_rng_state(), generator)


MORE = {
    "ibert": {**BERT, "model_type": "ibert", "type_vocab_size": 1},
    "convbert": {**BERT, "model_type": "convbert", "embedding_size": 32, "head_ratio": 1},
    "squeezebert": {**BERT, "model_type": "squeezebert", "embedding_size": 32},
    "albert": {**BERT, "model_type": "albert", "embedding_size": 16},
}


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_real_encoders_agree(family: str) -> None:
    """`build_model` would refuse ConvBERT, because it reads padding."""
    config, attention = FAMILIES[family] if family in FAMILIES else (MORE[family], "eager")
    for name in ("fp32", "bf16", "bf16-true"):
        encoder = load_encoder(config, attention=attention)
        model = MultitaskModel(encoder, TASKS, HeadSettings(pooling="attention"))
        seen = observed(name, model, *make_batch())
        assert seen.agreement(PRECISIONS[name]) == (True, "")
        assert seen.telemetry()["linear_products"].keys() == {PRECISIONS[name].products}
