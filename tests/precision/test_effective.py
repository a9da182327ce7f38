"""Formats that are told apart by what they round, and models that do not compute in what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny import CPU, EMULATED, TinyEncoder, tiny_batch, tiny_model
from tiny_encoders import BERT, FAMILIES, TASKS, make_batch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from transformers.pytorch_utils import Conv1D

from hpo.models.encoder import load_encoder
from hpo.models.multitask import HeadSettings, MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.effective import NO_PRODUCT, Observation, measure_products, observe_model
from hpo.precision.table import PRECISIONS

Round = Callable[[Tensor], Tensor]


def to_tf32(values: Tensor) -> Tensor:
    """Rounded to 10 bits of fraction, to nearest."""
    return ((values.view(torch.int32) + 2**12) & ~(2**13 - 1)).view(torch.float32)


def to_tf32_by_truncation(values: Tensor) -> Tensor:
    return (values.view(torch.int32) & ~(2**13 - 1)).view(torch.float32)


def to_float8(dtype: torch.dtype) -> Round:
    """As torchao does it: scaled so that the largest value is the format's largest."""

    def rounded(values: Tensor) -> Tensor:
        scale = torch.finfo(dtype).max / values.abs().max()
        return (values * scale).to(dtype).float() / scale

    return rounded


def as_dtype(dtype: torch.dtype) -> Round:
    return lambda values: values.to(dtype).float()


class Rounded(nn.Linear):
    """A layer in fp32 whose library rounds what it multiplies."""

    def __init__(self, rounding: Round, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rounding = rounding

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(self.rounding(inputs), self.rounding(self.weight), self.bias)


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (lambda values: values, "float32"),
        (to_tf32, "tf32"),
        (to_tf32_by_truncation, "tf32"),
        (as_dtype(torch.float16), "float16"),
        (as_dtype(torch.bfloat16), "bfloat16"),
        (to_float8(torch.float8_e4m3fn), "float8"),
        (to_float8(torch.float8_e5m2), "float8"),
        (torch.zeros_like, None),
    ],
)
@pytest.mark.parametrize("sizes", [(3, 1), (5, 3), (64, 7), (384, 1536)])
def test_formats_are_recognised_by_their_rounding(
    rounding: Round, expected: str | None, sizes: tuple[int, int]
) -> None:
    assert measure_products(Rounded(rounding, *sizes), (torch.randn(4, sizes[0]),), {}) == expected


def attention() -> nn.Module:
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    module.forward = lambda hidden: nn.MultiheadAttention.forward(module, hidden, hidden, hidden)  # type: ignore
    return module


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(16, 1, bias=False),
        lambda: Conv1D(32, 16),
        lambda: nn.Conv1d(5, 5, 3, padding=1),
        lambda: nn.Conv1d(5, 5, 3, padding=1, groups=5),
        attention,
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_every_kind_of_module_is_measured_as_it_is_called(
    build: Callable[[], nn.Module], dtype: torch.dtype | None
) -> None:
    module, inputs = build(), (torch.randn(2, 5, 16),)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        output = module(*inputs)
        found = measure_products(module, inputs, {})
    first = output[0] if isinstance(output, tuple) else output
    assert found == str(first.dtype).removeprefix("torch.")


def test_recurrent_layers_and_arguments_by_name_are_measured() -> None:
    assert measure_products(nn.LSTM(16, 16, num_layers=2), (), {"input": torch.randn(2, 5, 16)}) == "float32"


def test_a_product_may_be_narrower_than_the_output() -> None:
    """PyTorch's autocast leaves `bilinear` out, and reaches the products inside it."""
    module, inputs = nn.Bilinear(16, 16, 4), (torch.randn(2, 16),) * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(*inputs).dtype == torch.float32
        assert measure_products(module, inputs, {}) == "bfloat16"


def test_a_module_without_a_product_or_with_an_error_is_not_measured() -> None:
    added = nn.Linear(8, 8)
    added.forward = lambda inputs: inputs + added.weight  # type: ignore[method-assign]
    assert measure_products(added, (torch.randn(8, 8),), {}) == NO_PRODUCT
    refusing = nn.Linear(8, 8)
    refusing.forward = Mock(side_effect=ValueError("only for other inputs"))  # type: ignore[method-assign]
    before = refusing.weight
    assert measure_products(refusing, (torch.randn(2, 8),), {}) is None
    assert refusing.weight is before


Compute = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Own(nn.Module):
    """A layer with a weight and code of its own, behind the tiny encoder's."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.compute = compute

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(self.compute(self, hidden, self.weight), 0.1, self.training)


def plain(_: nn.Module, hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight)


def cast_back(_: nn.Module, hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 inside, and nothing to be seen of it."""
    with torch.autocast("cpu", enabled=False):
        return F.linear(hidden.float(), weight.float()).to(torch.bfloat16)


def wide_in_training(module: nn.Module, hidden: Tensor, weight: Tensor) -> Tensor:
    return cast_back(module, hidden, weight) if module.training else F.linear(hidden, weight)


def wide_in_evaluation(module: nn.Module, hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight) if module.training else cast_back(module, hidden, weight)


def rounded_by_a_library(_: nn.Module, hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden.bfloat16().float(), weight.bfloat16().float())


class WithOwn(TinyEncoder):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.own = Own(compute)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:  # type: ignore[override]
        hidden = torch.tanh(self.dense(self.embedding(input_ids)))
        return BaseModelOutput(self.norm(self.own(hidden).flatten(0, 1)).unflatten(0, hidden.shape[:2]))


def observed(name: str, model: nn.Module, *inputs: Tensor) -> Observation:
    precision = PRECISIONS[name]
    with backend_flags(precision, EMULATED):
        prepare_model(model, precision)
        amp = MixedPrecision(precision, EMULATED, CPU)
        return observe_model(model, amp, lambda model: model(*inputs))


@pytest.mark.parametrize(
    ("compute", "name", "said"),
    [
        (plain, "fp32", ""),
        (plain, "bf16", ""),
        (wide_in_training, "bf16", "in bfloat16: encoder.own (float32, output bfloat16)."),
        (wide_in_evaluation, "bf16", "encoder.own (float32, output bfloat16)."),
        (
            rounded_by_a_library,
            "fp32",
            "1 of 6 linear layers did not compute in float32: encoder.own (bfloat16, output float32).",
        ),
    ],
)
def test_hidden_formats_are_observed(compute: Compute, name: str, said: str) -> None:
    batch = tiny_batch()
    seen = observed(name, tiny_model(WithOwn(compute)), batch.input_ids_BL, batch.attention_mask_BL)
    found = seen.disagreement(PRECISIONS[name])
    assert found.endswith(said)
    assert bool(found) == bool(said)
    products = seen.telemetry(compiled=False)["linear_products"]
    assert sum(products.values()) == 6
    assert (len(products) == 1) == (not said)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_reduction_of_cublas_is_recorded_and_unchanged(name: str) -> None:
    def record() -> dict[str, bool]:
        with backend_flags(PRECISIONS[name], EMULATED):
            found: dict[str, bool] = Observation().telemetry(compiled=False)["reduced_precision_reduction"]
        return found

    flag, matmul = f"allow_{name}_reduced_precision_reduction", torch.backends.cuda.matmul
    defaults = record()
    assert defaults[flag] is True
    assert {name: getattr(matmul, name) for name in defaults} == defaults
    try:
        setattr(matmul, flag, False)  # as the study's own code may do
        assert record() == defaults | {flag: False}
    finally:
        setattr(matmul, flag, True)
    assert record() == defaults


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "bf16-true"])
def test_the_model_is_unchanged_bit_for_bit(name: str) -> None:
    batch, model = tiny_batch(), tiny_model(WithOwn(plain))
    prepare_model(model, PRECISIONS[name])
    model.encoder.own.eval()
    weights = dict(model.named_parameters())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    generator = torch.get_rng_state()
    observed(name, model, batch.input_ids_BL, batch.attention_mask_BL)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert all(weights[key] is value and value.grad is None for key, value in model.named_parameters())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.is_autocast_cache_enabled()
    assert not any(module._forward_hooks for module in model.modules())


MORE = {
    "ibert": {**BERT, "model_type": "ibert", "type_vocab_size": 1},
    "convbert": {**BERT, "model_type": "convbert", "embedding_size": 32, "head_ratio": 1},
    "squeezebert": {**BERT, "model_type": "squeezebert", "embedding_size": 32},
    "albert": {**BERT, "model_type": "albert", "embedding_size": 16},
}


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_sound_encoders_compute_in_the_requested_precision(family: str) -> None:
    """I-BERT has a class of its own for embeddings, ConvBERT a bias of two dimensions: neither multiplies."""
    config, attention = FAMILIES[family] if family in FAMILIES else (MORE[family], "eager")
    for name in ("fp32", "bf16", "bf16-true"):
        # Without `build_model`, which refuses ConvBERT since it reads padding.
        model = MultitaskModel(
            load_encoder(config, attention=attention), TASKS, HeadSettings(pooling="attention")
        )
        seen = observed(name, model, *make_batch())
        assert seen.disagreement(PRECISIONS[name]) == ""
        facts = seen.telemetry(compiled=False)
        assert facts["linear_products"].keys() == {PRECISIONS[name].products}
