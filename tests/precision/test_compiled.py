"""What a compiled model computes in, by what it loses of its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from test_effective import (
    Compute,
    WithOwn,
    cast_back,
    plain,
    rounded_by_a_library,
    wide_in_evaluation,
    wide_in_training,
)
from tiny import CPU, EMULATED, tiny_batch, tiny_model, tiny_objective
from torch import Tensor, nn

from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.compiled import observe_compiled
from hpo.precision.table import PRECISIONS
from hpo.training.compilation import run_both_modes

MORE = "encoder.own computed in more than bfloat16"
Run = Callable[[MultitaskModel], tuple[list[Tensor], list[Tensor]]]


def prepared(name: str, compute: Compute) -> tuple[MultitaskModel, Run]:
    """A model, and how a trial calls it."""
    precision, model = PRECISIONS[name], tiny_model(WithOwn(compute))
    prepare_model(model, precision)
    amp = MixedPrecision(precision, EMULATED, CPU)

    def step(model: MultitaskModel) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        return run_both_modes(model, tiny_objective(), tiny_batch(), amp)

    return model, step


@pytest.mark.parametrize(
    ("compute", "name", "compiles", "said"),
    [
        (plain, "fp32", False, ""),
        (plain, "bf16", True, ""),
        (plain, "fp16", False, ""),
        (plain, "bf16-true", False, ""),
        (cast_back, "bf16", True, f"compiled, {MORE}."),
        (wide_in_training, "bf16", False, f"compiled, {MORE} in training."),
        (wide_in_evaluation, "bf16", False, f"compiled, {MORE} in evaluation."),
        (rounded_by_a_library, "fp32", True, "compiled, encoder.own computed in less than it should."),
    ],
)
def test_compiled_models_are_judged_by_what_they_lose(
    compute: Compute, name: str, compiles: bool, said: str
) -> None:
    """Those marked run as the compiler traced them (their modules are gone), the others for speed do not."""
    model, step = prepared(name, compute)
    if compiles:
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    with backend_flags(PRECISIONS[name], EMULATED):
        assert observe_compiled(model, partial(step, model), PRECISIONS[name]) == said
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training


def test_a_layer_that_nothing_depends_on_is_not_judged() -> None:
    model, step = prepared("fp32", plain)
    model.unused = nn.Linear(3, 3)
    assert observe_compiled(model, partial(step, model), PRECISIONS["fp32"]) == ""


def test_where_two_passes_never_agree_nothing_is_said() -> None:
    model, step = prepared("bf16", plain)
    noise = iter(range(100))

    def noisy() -> tuple[list[Tensor], list[Tensor]]:
        training, evaluation = step(model)
        return [value + next(noise) for value in training[:1]], evaluation

    assert observe_compiled(model, noisy, PRECISIONS["bf16"]) == ""
