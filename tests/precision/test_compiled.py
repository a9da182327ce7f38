"""Compiled models, by the visible changes of their weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.observed_products import (
    Compute,
    Library,
    Round,
    WithOwn,
    cast_back,
    plain,
    rounded_first,
    rounded_in_training,
    to_float8,
    to_tf32,
    unrounded,
    wide_in_evaluation,
    wide_in_training,
)
from support.tiny import CPU, EMULATED, tiny_batch, tiny_model, tiny_objective
from torch import Tensor, nn
from torch.nn import functional as F

from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.compiled import Step, observe_compiled
from hpo.precision.effective import Agreement, Observation, observe_model
from hpo.precision.float8 import float8_facts, float8_weights
from hpo.precision.frozen import FrozenLinear, store_frozen
from hpo.precision.parts import run_in_float32
from hpo.precision.table import PRECISIONS
from hpo.training.compilation import run_both_modes

ALL = (
    "5 of 5 kinds of weights: encoder.dense.weight in training, encoder.own.weight in training, "
    "heads.1.1.weight in training and 2 more"
)
MORE = "encoder.own.weight was multiplied in more than bfloat16"
Run = Callable[[MultitaskModel], tuple[list[Tensor], list[Tensor]]]


def prepared(name: str, compute: Compute, autocast: str | None = None) -> tuple[MultitaskModel, Run]:
    """Return a model and a trial's call of it, under `autocast` or its own precision."""
    precision, model = PRECISIONS[name], tiny_model(WithOwn(compute))
    prepare_model(model, precision)
    amp = MixedPrecision(PRECISIONS[autocast or name], EMULATED, CPU)

    def step(model: MultitaskModel) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        return run_both_modes(model, tiny_objective(), tiny_batch(), amp)

    return model, step


def seen_eagerly(model: MultitaskModel, name: str = "bf16") -> Observation:
    amp, inputs = MixedPrecision(PRECISIONS[name], EMULATED, CPU), tiny_batch().inputs
    return observe_model(model, amp, lambda model: model(*inputs))


def judged(model: MultitaskModel, step: Step, name: str, seen: Observation | None = None) -> Agreement:
    precision, seen = PRECISIONS[name], seen or seen_eagerly(model, name)
    with backend_flags(precision, EMULATED):
        return observe_compiled(model, step, precision, seen)


@pytest.mark.parametrize(
    ("compute", "name", "compiles", "reason"),
    [
        (plain, "bf16", True, ""),
        (plain, "fp16", False, ""),
        (plain, "bf16-true", False, ""),
        (cast_back, "bf16", True, f"compiled, {MORE}."),
        (wide_in_training, "bf16", False, f"compiled, {MORE} in training."),
        (wide_in_evaluation, "bf16", False, f"compiled, {MORE} in evaluation."),
        (rounded_first, "fp32", True, "compiled, encoder.own.weight was multiplied in less than it should."),
    ],
)
def test_agreement_of_compiled_models(compute: Compute, name: str, compiles: bool, reason: str) -> None:
    """Only some are traced by the compiler, for speed."""
    model, step = prepared(name, compute)
    seen = seen_eagerly(model, name)
    if compiles:
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    assert judged(model, partial(step, model), name, seen) == (not reason, reason)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training


@pytest.mark.parametrize(
    ("name", "real", "reason"),
    [
        ("fp16", "bf16", "in less than it should"),
        ("bf16", "fp16", "in more than bfloat16"),
        ("fp16", "fp32", "in more than float16"),
        ("fp32", "fp16", "in less than it should"),
        ("bf16", "fp8", "in less than it should"),
        ("tf32", "bf16", "in less than it should"),
    ],
)
def test_graph_in_another_format(name: str, real: str, reason: str) -> None:
    model, step = prepared(name, plain, real)
    with Library(to_float8(torch.float8_e4m3fn) if real == "fp8" else unrounded):
        agreement = judged(model, partial(step, model), name)
    assert agreement.agrees is False
    assert reason in agreement.reason


@pytest.mark.parametrize(("rounding", "agrees"), [(unrounded, None), (to_tf32, True)])
def test_tf32_must_be_used_by_the_graph(rounding: Round, agrees: bool | None) -> None:
    model, step = prepared("tf32", plain)
    with Library(rounding):
        agreement = judged(model, partial(step, model), "tf32")
    assert agreement.agrees is agrees
    assert bool(agreement.reason) is (agrees is None)


class Float8Linear(nn.Linear):
    """Like torchao's: weights and inputs are scaled by their largest and rounded."""

    def forward(self, inputs: Tensor) -> Tensor:
        rounded = to_float8(torch.float8_e4m3fn)
        return F.linear(self.rounded(inputs.float(), rounded), self.rounded(self.weight, rounded), self.bias)

    def rounded(self, values: Tensor, rounding: Round) -> Tensor:
        """Round, with the gradient of the identity."""
        return values + (rounding(values) - values).detach()


class NoFloat8(Float8Linear):
    """A converted layer in bf16 after compilation."""

    def rounded(self, values: Tensor, _rounding: Round) -> Tensor:
        return values.bfloat16()


NoFloat8.__name__ = Float8Linear.__name__


@pytest.mark.parametrize(
    ("layer", "agrees", "reason"),
    [
        (Float8Linear, True, "^$"),
        (NoFloat8, False, "encoder.dense.weight was multiplied in more than float8"),
    ],
)
def test_float8_graph(layer: type[nn.Linear], agrees: bool, reason: str) -> None:
    model, step = prepared("bf16", plain)
    model.encoder.dense.__class__ = layer
    seen = Observation(float8=float8_facts(model), float8_weights=frozenset(float8_weights(model)))
    for name in ("encoder.dense.weight", "encoder.own.weight", "heads.0.1.weight"):
        seen.products[name].add("bfloat16")
    agreement = judged(model, partial(step, model), "fp8", seen)
    assert agreement.agrees is agrees
    assert re.search(reason, agreement.reason)


class Unused(nn.Linear):
    """A layer without an effect, or with one in some modes."""

    modes: tuple[bool, ...] = ()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden) * (self.training in self.modes)


@pytest.mark.parametrize(("modes", "where"), [((), "training and evaluation"), ((True,), "evaluation")])
def test_weight_without_a_visible_result_is_unverified(modes: tuple[bool, ...], where: str) -> None:
    model, step = prepared("fp32", plain)
    model.encoder.dense = nn.Sequential(model.encoder.dense, Unused(16, 16))
    model.encoder.dense[1].modes = modes
    reason = f"nothing shows the products of 1 of 6 kinds of weights: encoder.dense.1.weight in {where}."
    assert judged(model, partial(step, model), "fp32") == (None, f"compiled, {reason}")


def test_unread_pooler_does_not_count() -> None:
    class Pooled(WithOwn):
        def forward(self, input_ids: Tensor, **inputs: Any) -> Any:  # type: ignore[override]
            self.pooler(self.embedding(input_ids)[:, 0])
            return super().forward(input_ids, **inputs)

    model, step = prepared("fp32", plain)
    model.encoder.__class__ = Pooled
    model.encoder.pooler = nn.Sequential(nn.Linear(16, 3))
    assert judged(model, partial(step, model), "fp32") == (True, "")


def test_model_without_known_products_is_unverified() -> None:
    model, step = prepared("bf16", plain)
    agreement = judged(model, partial(step, model), "bf16", Observation())
    assert agreement == (None, "compiled, no product with a weight was seen.")


@pytest.mark.parametrize(("real", "agrees"), [("bf16", True), ("fp16", False)])
def test_zero_weights_of_a_new_adapter(real: str, agrees: bool) -> None:
    model, step = prepared("bf16", plain, real)
    nn.init.zeros_(model.encoder.dense.weight)
    assert judged(model, partial(step, model), "bf16").agrees is agrees


class Noise:
    """Add another number to some tensors at each pass, like an atomic sum."""

    def __init__(self, step: Step, which: slice) -> None:
        self.step, self.which, self.numbers = step, which, itertools.count()

    def __call__(self) -> tuple[list[Tensor], list[Tensor]]:
        training, evaluation = map(list, self.step())
        training[self.which] = [value + next(self.numbers) for value in training[self.which]]
        return training, evaluation


LESS = "compiled, encoder.own.weight was multiplied in less than it should in training."


@pytest.mark.parametrize(
    ("compute", "name", "which", "expected"),
    [
        (plain, "bf16", slice(1, 2), (True, "")),
        (wide_in_training, "bf16", slice(1, 2), (False, f"compiled, {MORE} in training.")),
        (rounded_in_training, "fp32", slice(1, 2), (False, LESS)),
        (plain, "bf16", slice(None), (None, f"compiled, nothing shows the products of {ALL}.")),
        (wide_in_evaluation, "bf16", slice(None), (False, f"compiled, {MORE} in evaluation.")),
    ],
)
def test_noisy_tensors_hide_no_others(
    compute: Compute, name: str, which: slice, expected: tuple[bool | None, str]
) -> None:
    model, step = prepared(name, compute)
    assert judged(model, Noise(partial(step, model), which), name) == expected


@pytest.mark.parametrize("kind", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("lies", [False, True])
def test_stored_weights_by_their_products(kind: str, name: str, lies: bool) -> None:
    model, step = prepared(name, plain)
    # 64 inputs, a block of nf4: bitsandbytes 0.50 decodes narrower layers wrongly on a CPU.
    model.encoder.dense = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16).requires_grad_(False))
    store_frozen(model, kind, torch.float32)
    stored: Any = model.encoder.dense[1]
    before = {key: value.clone() for key, value in (*model.named_parameters(), *model.named_buffers())}
    if lies and name == "fp32":
        stored.forward = lambda x: FrozenLinear.forward(stored, x.bfloat16()).float()
    if lies and name == "bf16":
        stored.forward = partial(wide, stored)
    agreement = judged(model, partial(step, model), name)
    # Weights stored in bf16 have no bits to lose under bf16, and none to show otherwise.
    assert agreement.agrees is (not lies if kind != "bf16" else name == "bf16"), agreement
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(value, before[key]), key


def wide(stored: FrozenLinear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return FrozenLinear.forward(stored, x.float()).bfloat16()


def test_part_in_fp32_in_a_compiled_model() -> None:
    model, step = prepared("bf16", plain)
    run_in_float32(model.get_submodule("encoder.dense"))
    seen = seen_eagerly(model)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    assert judged(model, partial(step, model), "bf16", seen) == (True, "")


def test_compiled_fp32_layer_outside_the_parts() -> None:
    model, step = prepared("bf16", plain)
    seen = seen_eagerly(model)
    run_in_float32(model.get_submodule("encoder.dense"))  # after its observation
    agrees, reason = judged(model, partial(step, model), "bf16", seen)
    assert agrees is False
    assert "encoder.dense.weight was multiplied in more than bfloat16" in reason


def test_part_with_a_rounded_output_is_unverified() -> None:
    """The next product casts it to bf16, so a lost change proves nothing about the part."""
    model, step = prepared("bf16", plain)
    dense = model.get_submodule("encoder.dense")
    run_in_float32(dense)
    dense.register_forward_hook(lambda _, __, output: output + (output.round(decimals=1) - output).detach())
    agrees, reason = judged(model, partial(step, model), "bf16")
    assert agrees is None
    assert reason.endswith("kinds of weights: encoder.dense.weight in evaluation.")
