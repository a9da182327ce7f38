"""Compiled models, by the visible changes of their weights."""

import itertools
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import observed_products as planted
from support.observed_products import Compute, Library, WithOwn, plain, to_float8
from support.tiny import EMULATED, amp_of, tiny_batch, tiny_model, tiny_objective, unchanged
from torch import Tensor, nn
from torch.nn import functional as F

from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import backend_flags, prepare_model
from hpo.precision.compiled import Step, _rounded, observe_compiled
from hpo.precision.effective import observe_model
from hpo.precision.float8 import float8_facts, float8_weights
from hpo.precision.frozen import FrozenLinear, store_frozen
from hpo.precision.observation import Agreement, Observation
from hpo.precision.parts import run_in_float32
from hpo.precision.table import PRECISIONS
from hpo.training.compilation import run_both_modes

NAMED = ", ".join(f"{name}.weight in training" for name in ("encoder.dense", "encoder.own", "heads.1.1"))
ALL = f"5 of 5 kinds of weights: {NAMED} and 2 more"
MORE = "encoder.own.weight was multiplied in more than bfloat16"
LESS = "compiled, encoder.own.weight was multiplied in less than it should"


def prepared(name: str, compute: Compute = plain, autocast: str = "") -> tuple[MultitaskModel, Step]:
    """Return a model and a trial's call of it, under `autocast` or its own precision."""
    model = tiny_model(WithOwn(compute))
    prepare_model(model, PRECISIONS[name])

    def step() -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        return run_both_modes(model, tiny_objective(), tiny_batch(), amp_of(autocast or name))

    return model, step


def seen_eagerly(model: MultitaskModel, name: str = "bf16") -> Observation:
    inputs = tiny_batch().inputs
    return observe_model(model, amp_of(name), lambda model: model(*inputs))


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
        (planted.cast_back, "bf16", True, f"compiled, {MORE}."),
        (planted.wide_in_training, "bf16", False, f"compiled, {MORE} in training."),
        (planted.wide_in_evaluation, "bf16", False, f"compiled, {MORE} in evaluation."),
        (planted.rounded_first, "fp32", True, f"{LESS}."),
    ],
)
def test_agreement_of_compiled_models(compute: Compute, name: str, compiles: bool, reason: str) -> None:
    """Only some are traced by the compiler, for speed."""
    model, step = prepared(name, compute)
    seen, counted = seen_eagerly(model, name), Mock(side_effect=step)
    if compiles:
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    generator = torch.get_rng_state()
    with unchanged(model):
        assert judged(model, counted, name, seen) == (not reason, reason)
    if not reason:
        assert counted.call_count == 8, "twice unchanged, once for all weights and once for each of five"
    assert torch.equal(torch.get_rng_state(), generator)


class Shifted(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.shift = linear.weight, linear.bias

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight, self.shift)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-true"])
def test_bias_hides_no_product(name: str, shifted: bool) -> None:
    """Rare classes begin with such a bias."""
    model, step = prepared(name)
    for head in model.heads:
        nn.init.constant_(head.get_parameter("1.bias"), -5.0)
        if shifted:
            head[1] = Shifted(head[1])
    with unchanged(model):
        assert judged(model, step, name) == (True, "")


@pytest.mark.parametrize(
    ("name", "real", "reason"),
    [
        ("fp16", "bf16", "in less than it should"),
        ("bf16", "fp16", "in more than bfloat16"),
        ("fp16", "fp32", "in more than float16"),
        ("fp32", "fp16", "in less than it should"),
        ("bf16", "fp8", "in less than it should"),
        ("tf32", "bf16", "in less than it should"),
        ("tf32", "fp32", "no product was seen to use it"),
        ("tf32", "tf32", ""),
    ],
)
def test_graph_in_another_format(name: str, real: str, reason: str) -> None:
    model, step = prepared(name, plain, real)
    nn.init.zeros_(model.encoder.dense.weight)  # like a new adapter
    roundings = {"fp8": to_float8(torch.float8_e4m3fn), "tf32": planted.to_tf32}
    with Library(roundings.get(real, planted.unrounded)):
        agreement = judged(model, step, name)
    assert agreement.agrees is (not reason or (None if real == "fp32" and name == "tf32" else False))
    assert reason in agreement.reason


def test_grid_of_weights() -> None:
    """Two bits of fraction, at most a power of two, 0 below its thousandth; the first value is above it."""
    rounded = _rounded(torch.tensor([[0.3, 1.1, -1.4, 7.0], [3.3e-3, 3.7e-3, 2.0, 0.0]]))
    assert rounded.tolist() == [[7.0, 1.0, -1.5, 4.0], [0.0, 0.00390625, 2.0, 0.0]]
    assert _rounded(torch.zeros(2)).tolist() == [1.75 * 2.0**-6, 2.0**-6], "a new adapter"


class Packed(Tensor):
    """A weight in a format of another library."""


@pytest.mark.parametrize(
    "weight",
    [torch.ones(16, 16, dtype=torch.int8), torch.randn(16, 16).as_subclass(Packed)],
    ids=["int8", "packed"],
)
def test_quantised_weight_is_unverified(weight: Tensor) -> None:
    model, step = prepared("bf16")
    nothing = (None, "compiled, no product with a weight was seen.")
    assert judged(model, step, "bf16", Observation()) == nothing
    seen = seen_eagerly(model)
    model.encoder.own.weight = nn.Parameter(weight, requires_grad=False)
    said = "compiled, encoder.own.weight is quantised, so that its products cannot be measured."
    assert judged(model, step, "bf16", seen) == (None, said)


class Float8Linear(nn.Linear):
    """Like torchao's: weights and inputs are scaled by their largest and rounded."""

    is_real = True

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(self.rounded(inputs.float()), self.rounded(self.weight), self.bias)

    def rounded(self, values: Tensor) -> Tensor:
        """Round, with the gradient of the identity. An unreal layer stays in bf16."""
        rounding = to_float8(torch.float8_e4m3fn)
        return values + (rounding(values) - values).detach() if self.is_real else values.bfloat16()


@pytest.mark.parametrize("is_real", [True, False])
def test_float8_graph(is_real: bool) -> None:
    model, step = prepared("bf16")
    model.encoder.dense.__class__ = Float8Linear
    model.encoder.dense.is_real = is_real
    seen = Observation(float8=float8_facts(model), float8_weights=frozenset(float8_weights(model)))
    for name in ("encoder.dense.weight", "encoder.own.weight", "heads.0.1.weight"):
        seen.products[name].add("bfloat16")
    agreement = judged(model, step, "fp8", seen)
    said = "compiled, encoder.dense.weight was multiplied in more than float8"
    assert agreement.agrees is is_real
    assert agreement.reason.startswith("" if is_real else said)


class Unused(nn.Linear):
    """A layer without an effect, or with one in training."""

    trains = False

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden) * (self.training and self.trains)


@pytest.mark.parametrize(("trains", "where"), [(False, "training and evaluation"), (True, "evaluation")])
def test_weight_without_a_visible_result_is_unverified(trains: bool, where: str) -> None:
    model, step = prepared("fp32")
    model.encoder.dense = nn.Sequential(model.encoder.dense, Unused(16, 16))
    model.encoder.dense[1].trains = trains
    reason = f"nothing shows the products of 1 of 6 kinds of weights: encoder.dense.1.weight in {where}."
    assert judged(model, step, "fp32") == (None, f"compiled, {reason}")


def test_unread_pooler_does_not_count() -> None:
    class Pooled(WithOwn):
        def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
            self.pooler(self.embedding(input_ids)[:, 0])
            return super().forward(input_ids, **inputs)

    model, step = prepared("fp32")
    model.encoder.__class__ = Pooled
    model.encoder.pooler = nn.Sequential(nn.Linear(16, 3))
    assert judged(model, step, "fp32") == (True, "")


class Noise:
    """Add another number to some tensors at each pass, like an atomic sum."""

    def __init__(self, step: Step, which: slice) -> None:
        self.step, self.which, self.numbers = step, which, itertools.count()

    def __call__(self) -> tuple[list[Tensor], list[Tensor]]:
        training, evaluation = map(list, self.step())
        training[self.which] = [value + next(self.numbers) for value in training[self.which]]
        return training, evaluation


@pytest.mark.parametrize(
    ("compute", "name", "which", "expected"),
    [
        (plain, "bf16", slice(1, 2), (True, "")),
        (planted.wide_in_training, "bf16", slice(1, 2), (False, f"compiled, {MORE} in training.")),
        (planted.rounded_in_training, "fp32", slice(1, 2), (False, f"{LESS} in training.")),
        (plain, "bf16", slice(None), (None, f"compiled, nothing shows the products of {ALL}.")),
        (planted.wide_in_evaluation, "bf16", slice(None), (False, f"compiled, {MORE} in evaluation.")),
    ],
)
def test_noisy_tensors_hide_no_others(compute: Compute, name: str, which: slice, expected: Any) -> None:
    model, step = prepared(name, compute)
    assert judged(model, Noise(step, which), name) == expected


@pytest.mark.parametrize("kind", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("lies", [False, True])
def test_stored_weights_by_their_products(kind: str, name: str, lies: bool) -> None:
    model, step = prepared(name)
    # 64 inputs, a block of nf4: bitsandbytes 0.50 decodes narrower layers wrongly on a CPU.
    model.encoder.dense = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16).requires_grad_(False))
    store_frozen(model, kind, torch.float32)
    stored: Any = model.encoder.dense[1]

    def lie(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return FrozenLinear.forward(stored, x.float() if name == "bf16" else x.bfloat16()).to(x.dtype)

    if lies:
        stored.forward = lie
    with unchanged(model):
        agreement = judged(model, step, name)
    # Weights stored in bf16 have no bits to lose under bf16, and none to show otherwise.
    assert agreement.agrees is (not lies if kind != "bf16" else name == "bf16"), agreement


@pytest.mark.parametrize("in_part", [True, False])
def test_part_in_fp32_in_a_compiled_model(in_part: bool) -> None:
    model, step = prepared("bf16")
    before = seen_eagerly(model)
    run_in_float32(model.get_submodule("encoder.dense"))
    seen = seen_eagerly(model) if in_part else before
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    said = "compiled, encoder.dense.weight was multiplied in more than bfloat16."
    assert judged(model, step, "bf16", seen) == (in_part, "" if in_part else said)


def test_part_with_a_rounded_output_is_unverified() -> None:
    """The next product casts it to bf16, so a lost change proves nothing about the part."""
    model, step = prepared("bf16")
    dense = model.get_submodule("encoder.dense")
    run_in_float32(dense)
    dense.register_forward_hook(lambda _, __, output: output + (output.round(decimals=1) - output).detach())
    agrees, reason = judged(model, step, "bf16")
    assert agrees is None
    assert reason.endswith("kinds of weights: encoder.dense.weight in evaluation.")
