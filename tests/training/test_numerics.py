"""Numeric telemetry of a step: by construction, against fp64, and in the loop."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tiny import CPU, EMULATED, tiny_model
from tiny_encoders import BERT, make_model
from tiny_loop import accumulate, amp_of, train_for
from torch import nn

from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, prepare_model
from hpo.precision.table import PRECISIONS
from hpo.training import numerics
from hpo.training.loop import apply_gradients
from hpo.training.numerics import StepProbe
from hpo.training.optim import build_optimizer, parameter_groups
from hpo.training.progress import Budget
from hpo.trial.executor import Executor

LAYER = "encoder.encoder.layer.0.attention.self.query.weight"


@pytest.fixture(autouse=True)
def _all_weights_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "SAMPLE_ELEMENTS", 2**30)


def sgd(model: MultitaskModel, lr: float = 2.0**-12) -> torch.optim.Optimizer:
    groups = parameter_groups(model, learning_rate=lr, weight_decay=0.0)
    return build_optimizer("sgd", groups, betas=(0, 0))


def with_gradients(model: MultitaskModel, value: float = 1.0) -> dict[str, nn.Parameter]:
    """The parameters that are trained, each with a gradient of `value` everywhere."""
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, value)
    return parameters


def probe(
    model: MultitaskModel, precision: str = "fp32", optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    optimizer = optimizer or sgd(model)
    seen = StepProbe(model, amp_of(precision))
    seen.start()
    optimizer.step()
    return seen.result(7)


# By construction


@pytest.mark.parametrize(
    ("precision", "value", "expected"),
    [
        ("fp16", 2.0**-14, 0.0),  # fp16's smallest normal number
        ("fp16", 2.0**-15, 0.5),
        ("bf16", 2.0**-126, 0.0),
        ("bf16", 2.0**-127, 0.5),
        ("fp32", 2.0**-127, 0.5),
        ("bf16-true", 2.0**-127, 0.5),
    ],
)
def test_what_underflows_depends_on_the_dtype(precision: str, value: float, expected: float) -> None:
    model = make_model()
    prepare_model(model, PRECISIONS[precision])
    gradient = with_gradients(model)[LAYER].grad
    assert gradient is not None
    gradient[:, ::2] = value
    found = probe(model, precision)
    assert (found["step"], found["loss_scale"]) == (7, None if precision != "fp16" else 65536.0)
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.grad is not None)
    assert found["all"]["underflow"] == pytest.approx(expected * gradient.numel() / size, rel=1e-3)
    assert found["all"]["overflow"] == 0.0


def test_what_computes_in_fp32_has_its_range() -> None:
    """Autocast reaches neither norms nor embeddings."""
    model = make_model()
    for name, parameter in with_gradients(model).items():
        if "LayerNorm" in name or "embeddings" in name:
            parameter.grad = torch.full_like(parameter, 2.0**-20)
    assert probe(model, "fp16")["all"]["underflow"] == 0
    for name, parameter in with_gradients(model).items():
        if ".layer.0." in name:
            parameter.grad = torch.full_like(parameter, 2.0**-20)
    assert probe(model, "fp16")["all"]["underflow"] > 0


def test_tokens_that_are_not_in_the_batch_do_not_underflow() -> None:
    model = make_model()
    parameters = with_gradients(model)
    table = parameters["encoder.embeddings.word_embeddings.weight"]
    assert table.grad is not None
    table.grad[5:] = 0
    assert probe(model)["all"]["underflow"] == 0
    table.grad[:5, ::2] = 0
    others = sum(parameter.numel() for parameter in parameters.values() if parameter is not table)
    assert probe(model)["all"]["underflow"] == pytest.approx(5 * 16 / (5 * 32 + others), rel=1e-3)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_overflows(value: float) -> None:
    model = make_model()
    parameters = with_gradients(model)
    gradient = parameters[LAYER].grad
    assert gradient is not None
    gradient[0] = value
    found = probe(model)["all"]
    size = sum(parameter.numel() for parameter in parameters.values())
    assert found["overflow"] == pytest.approx(32 / size, rel=1e-3)
    assert (found["underflow"], found["updates_lost"], found["update_ratio"]) == (0.0, None, None)


@pytest.mark.parametrize(
    ("precision", "lr", "lost"),
    [
        ("fp32", 2.0**-12, 0.0),
        ("fp32", 2.0**-26, 1.0),
        ("bf16-true", 2.0**-12, 1.0),
        ("bf16-true", 2.0**-6, 0.0),
    ],
)
def test_updates_that_rounding_loses(precision: str, lr: float, lost: float) -> None:
    model = make_model()
    prepare_model(model, PRECISIONS[precision])
    for parameter in with_gradients(model).values():
        parameter.data.fill_(1.0)
    found = probe(model, precision, sgd(model, lr))
    assert found["all"]["updates_lost"] == lost
    assert found["all"]["update_ratio"] == pytest.approx(0.0 if lost else lr, rel=1e-3)


def test_a_sample_stands_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices far larger than what is looked at."""
    large = {**BERT, "hidden_size": 128, "intermediate_size": 512}
    shares = []
    for elements in (2**30, 2**14):
        monkeypatch.setattr(numerics, "SAMPLE_ELEMENTS", elements)
        torch.manual_seed(0)
        model = make_model(large)
        for name, parameter in with_gradients(model).items():
            is_linear = parameter.ndim == 2 and "embeddings" not in name
            parameter.grad = 2.0**-14 * torch.randn_like(parameter) if is_linear else None
        shares.append(probe(model, "fp16", sgd(model, 10.0)))
    whole, sample = (found["all"] for found in shares)
    assert whole["underflow"] == pytest.approx(0.68, abs=0.02)  # of a normal distribution, within one sigma
    assert sample["underflow"] == pytest.approx(whole["underflow"], abs=0.03)
    assert sample["update_ratio"] == pytest.approx(whole["update_ratio"], rel=0.1)


# Against a plain reference


def test_underflow_of_fp16_is_that_of_the_gradients_in_fp64() -> None:
    """A share of the gradients of linear layers below fp16's smallest normal number, by the scale."""
    for scale in (1.0, 2.0**-6, 2.0**-10):
        model, plain = tiny_model(), tiny_model().double()
        amp = MixedPrecision(PRECISIONS["fp16"], EMULATED.model_copy(update={"init_scale": scale}), CPU)
        accumulate(model, amp)
        accumulate(plain, amp_of("fp32"))
        for parameter in model.heads.parameters():
            parameter.grad = None
        found = StepProbe(model, amp)
        found.start()
        true = counted = 0
        for parameter in plain.encoder.dense.parameters():
            assert parameter.grad is not None
            true += int((parameter.grad.abs() * scale < 2.0**-14).sum())
            counted += parameter.numel()
        # The embedding is fp32, but a row's gradient that comes through the linear layer may be gone.
        table = model.encoder.embedding.weight.grad
        rows = table[table.abs().amax(1) > 0]
        apply_gradients(model, sgd(model), torch.zeros(()), amp, 0.0)
        share = found.result(1)["all"]["underflow"]
        expected = (true + int((rows == 0).sum())) / (counted + rows.numel())
        assert share == pytest.approx(expected, abs=0.02)
        if scale == 1.0:
            small = share
    assert share > small + 0.2


def test_a_step_that_loss_scaling_skips_has_no_update() -> None:
    model = tiny_model()
    amp = MixedPrecision(PRECISIONS["fp16"], EMULATED.model_copy(update={"init_scale": 2.0**30}), CPU)
    optimizer = sgd(model)
    for is_skipped in (True, False):
        if not is_skipped:
            amp.scaler.update(2.0**8)
        loss = accumulate(model, amp)
        seen = StepProbe(model, amp)
        seen.start()
        apply_gradients(model, optimizer, loss, amp, 1.0)
        found = seen.result(1)
        assert found["loss_scale"] == (2.0**30 if is_skipped else 2.0**8)
        assert (found["all"]["overflow"] > 0) == is_skipped
        assert (found["all"]["updates_lost"] is None) == is_skipped
        assert (found["all"]["update_ratio"] is None) == is_skipped


# In the loop


def test_a_step_between_two_evaluations_is_measured(executor: Executor) -> None:
    trained = train_for(executor, Budget(max_steps=7), 3, fp_precision="bf16-true")
    assert len(trained.losses) == trained.evaluations[-1].step
    found = [evaluation.numerics or {} for evaluation in trained.evaluations]
    assert [one["step"] for one in found] == [2, 4, 6]
    for one in found:
        assert one["skipped_steps"] == 0
        assert set(one["all"]) == {"underflow", "overflow", "update_ratio", "updates_lost"}
        assert one["all"]["updates_lost"] > 0.01
        assert json.loads(json.dumps(one)) == one


def test_measuring_changes_nothing(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"fp_precision": "fp16", "dropout": 0.1}
    measured = train_for(executor, Budget(max_steps=3), 3, **params).losses
    monkeypatch.setattr(Budget, "is_measured", lambda *_: False)
    trained = train_for(executor, Budget(max_steps=3), 3, **params)
    assert trained.losses == measured
    assert {evaluation.numerics for evaluation in trained.evaluations} == {None}


def test_steps_are_skipped_since_the_evaluation_before(executor: Executor) -> None:
    amp = EMULATED.model_copy(update={"init_scale": 2.0**22})
    trained = train_for(executor, Budget(max_steps=9), 3, amp, fp_precision="fp16")
    found = [evaluation.numerics or {} for evaluation in trained.evaluations]
    total = trained.mixed_precision.statistics().skipped_steps
    assert total is not None
    assert found[0]["skipped_steps"] > 0
    assert sum(one["skipped_steps"] for one in found) == total
    scales = [one["loss_scale"] for one in found]
    assert scales[0] > scales[-1] >= trained.mixed_precision.scale_value().item()
