"""The training loop against a plain loop; budgets, clocks, micro-batches and clipping."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import (
    CPU,
    CPU_PRECISIONS,
    TASKS,
    amp_of,
    overflow_in_reduced_precision,
    tiny_model,
    tiny_objective,
    tiny_study,
)
from support.tiny_loop import accumulate, config_of, parameter_group, train_for
from torch import Tensor, nn

from hpo.config.sections import EvaluationConfig
from hpo.config.trial_config import build_trial_config
from hpo.data.batches import collate, training_batches
from hpo.precision.amp import backend_flags, tf32_is_on
from hpo.precision.table import PRECISIONS
from hpo.random_numbers import step_seed
from hpo.tasks.options import LossOptions
from hpo.training import loop as loop_module
from hpo.training.budget import Budget, TrainState
from hpo.training.loop import apply_gradients
from hpo.training.losses import count_items, loss_sum
from hpo.training.optim import build_optimizer, gradient_norm
from hpo.training.throughput import CompileClock, ThroughputMeter, TrainingClock
from hpo.trial.executor import Executor
from hpo.trial.parts import training_args


def test_fp32_fallback_without_tf32() -> None:
    seen: list[tuple[str, bool]] = []

    def watch(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        seen.append(("forward", tf32_is_on()))
        output.register_hook(lambda _: seen.append(("backward", tf32_is_on())))

    model = tiny_model()
    model.encoder.dense.register_forward_hook(watch)
    overflow_in_reduced_precision(model)
    amp = amp_of("bf16", fallback_to_fp32=True, tf32=True)
    with backend_flags(amp.precision, amp.config):
        assert accumulate(model, amp).isfinite()
    assert seen == [("forward", True), ("forward", False), ("backward", False)]


def reference_losses(executor: Executor, num_steps: int, **params: Any) -> list[float]:
    """Return the losses of a plain training loop in any precision."""
    config = config_of(executor, **params)
    precision = PRECISIONS[config.fp_precision]
    split = executor.loader.tokens("train", config)
    torch.manual_seed(config.seed)
    model = executor.loader.build_model(config).train()
    if precision.weights == "bfloat16":
        model.bfloat16()
    # fp32 moments whatever the weights: update fp32 copies, then round.
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = [weight.detach().float().requires_grad_() for weight in weights]
    decay, rest = [c for c in copies if c.dim() >= 2], [c for c in copies if c.dim() < 2]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate)
    scaler, losses = torch.amp.GradScaler("cpu", enabled=precision.loss_scaling), []
    batches = training_batches(split.lengths_W, config.batch_size, config.seed, epoch=0)
    for step, windows in enumerate(batches[:num_steps]):
        position = (step + 0.5) / num_steps
        factor = position / 0.1 if position < 0.1 else (1 - position) / 0.9
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        batch = collate(split, windows, executor.tasks, 0)
        torch.manual_seed(step_seed(config.seed, step))
        dtype = getattr(torch, precision.autocast or "bfloat16")
        with torch.autocast("cpu", dtype=dtype, enabled=precision.autocast is not None):
            logits = model(batch.input_ids_BL, batch.attention_mask_BL)
        loss = torch.zeros(())
        for task in executor.tasks:
            target = batch.targets[task.name]
            total = loss_sum(task, logits[task.name], target, LossOptions(), None, batch.attention_mask_BL)
            loss = loss + total / count_items(task, target)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        for weight, copy in zip(weights, copies, strict=True):
            copy.data = weight.detach().float()
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(copies, config.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)
    return losses


@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_losses_equal_a_plain_loop(executor: Executor, name: str) -> None:
    params = {"fp_precision": name, "dropout": 0.1, "head_dropout": 0.1}
    ours = train_for(executor, Budget(max_steps=6), **params).losses
    plain = reference_losses(executor, 6, **params)
    assert len(ours) == 6
    assert ours[0] != pytest.approx(ours[-1], rel=1e-3)  # it learns something
    assert ours == pytest.approx(plain, rel=1e-5 if name == "fp32" else 2e-3)


def evenly(count: int) -> tuple[Fraction, ...]:
    return EvaluationConfig(per_trial=count).shares(None)


def test_evaluations_of_a_budget_in_seconds() -> None:
    budget = Budget(max_seconds=10.0)
    for seconds, due in ((0.0, 0), (4.9, 1), (5.0, 2), (9.999999999999998, 3), (10.0, 4), (11.0, 4)):
        assert budget.evaluations_due(TrainState(train_seconds=seconds), evenly(4)) == due


@pytest.mark.parametrize("num_steps", [1, 7, 28, 264])
def test_exact_steps_of_evaluations(num_steps: int) -> None:
    budget = Budget(max_steps=num_steps)
    for count in range(1, 65):
        for step in range(1, num_steps + 1):
            due = sum(math.ceil(Fraction(n * num_steps, count)) <= step for n in range(1, count + 1))
            assert budget.evaluations_due(TrainState(step=step), evenly(count)) == due, (count, step)


def test_clocks_of_steps_and_evaluations(executor: Executor, now: list[float], monkeypatch: Any) -> None:
    """Steps take a second. An evaluation queues two seconds on the device; decoding takes eight."""
    state, meter, compiler = TrainState(), ThroughputMeter(CPU, warmup_steps=0), CompileClock()
    queued = [0.0]

    def first(name: str, action: Callable[[], None]) -> None:
        function = getattr(loop_module, name)
        monkeypatch.setattr(loop_module, name, lambda *args, **more: (action(), function(*args, **more))[1])

    def spend(seconds: float, compiling: float = 0.0) -> None:
        now[0] += seconds + compiling
        compiler.seconds += compiling
        compiler.num_interruptions += compiling > 0

    def forward() -> None:
        spend(0.0, 1000.0)
        queued[0] = 2.0

    first("apply_gradients", lambda: spend(1.0, 1000.0 * (state.step == 1)))
    first("predict_logits", forward)
    first("decode_tasks", lambda: spend(8.0))
    first("synchronize", lambda: spend(queued.pop() if queued else 0.0) or queued.append(0.0))
    clock = TrainingClock(state, meter, compiler)
    (last,) = train_for(executor, Budget(max_seconds=4.5), 1, clock=clock).evaluations
    assert (state.step, state.train_seconds, compiler.seconds) == (5, 5.0, 2000.0)
    assert (state.evaluation_seconds, state.evaluation_scoring_seconds) == (10.0, 8.0)
    num_examples = len(executor.loader.tokens("validation", config_of(executor)).examples)
    assert last.examples_per_second == num_examples / 2
    assert (meter.totals().seconds, last.rates["step_seconds_p95"]) == (4.0, pytest.approx(1.0, rel=0.01))


@pytest.mark.parametrize(
    ("budget", "used"),
    [({"epochs": 2}, 0.25), ({"epochs": 0.5}, 1.0), ({"max_steps": 20}, 0.25), ({"max_seconds": 8}, 0.25)],
)
def test_used_share_of_a_budget(budget: dict[str, Any], used: float, tmp_path: Path) -> None:
    study = tiny_study(tmp_path, training=budget | {"batch_size": 8})
    args = training_args(study, build_trial_config(study, {}, "fp32"), num_windows=78)
    assert args.budget.used(TrainState(step=5, train_seconds=2)) == pytest.approx(used)


def gradients_of(micro_batch_size: int, is_uncertain: bool) -> tuple[float, dict[str, Tensor]]:
    model, loss_fn = tiny_model(), tiny_objective()
    if is_uncertain:
        loss_fn.log_variance = {task.name: nn.Parameter(torch.tensor(0.3)) for task in TASKS}
    loss = accumulate(model, amp_of("fp32"), micro_batch_size, loss_fn)
    return float(loss), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("is_uncertain", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 5])
def test_micro_batches_equal_the_whole_batch(micro_batch_size: int, is_uncertain: bool) -> None:
    loss, gradients = gradients_of(6, is_uncertain)
    micro_loss, micro_gradients = gradients_of(micro_batch_size, is_uncertain)
    assert micro_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(micro_gradients, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)])
def test_gradient_norm_equals_fp64(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    shapes = [(300, 400), (7,), (), (1, 50)]
    for scale in (1e-3, 1e4):
        gradients = [torch.randn(shape).to(dtype) * scale for shape in shapes for dtype in dtypes]
        gradients.append(torch.randn(20, 30).to(dtypes[0]).t())
        expected = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
        norm = gradient_norm(gradients, device)
        assert norm.dtype == torch.float32
        assert float(norm) == pytest.approx(float(expected), rel=5e-6)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_clipping_of_bf16_gradients(device_type: str) -> None:
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.zeros(n, 401, dtype=torch.bfloat16)) for n in (3, 57, 300))
    for number, weight in enumerate(model):
        weight.grad = (1e4 * torch.randn_like(weight) + 10.0**number).to(torch.bfloat16)
    exact = torch.cat([weight.grad.double().flatten() for weight in model])
    amp = amp_of("bf16-true")
    amp.device = replace(CPU, type=device_type)
    optimizer = build_optimizer("sgd", [parameter_group(*model)], betas=(0.0, 0.0))
    apply_gradients(model.parameters(), optimizer, torch.tensor(1.0), amp, max_grad_norm=1.0)
    clipped = torch.cat([weight.grad.double().flatten() for weight in model])
    expected = (exact / exact.norm()).to(torch.bfloat16).double()
    # A product that lies between two bf16 numbers may be rounded to either.
    assert bool(((clipped - expected).abs() <= 2**-7 * expected.abs()).all())
    assert float(clipped.norm()) == pytest.approx(float(expected.norm()), rel=1e-4)
