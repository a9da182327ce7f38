"""The training loop against a plain loop, and micro-batches against whole batches."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from device_reads import META_GPU, WaitsForDevice, no_waiting
from tiny import (
    CPU,
    CPU_PRECISIONS,
    EMULATED,
    ENCODER,
    TASKS,
    tiny_batch,
    tiny_executor,
    tiny_model,
    tiny_objective,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel

from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.data.batches import collate, evaluation_batches, training_batches
from hpo.data.examples import Example
from hpo.device import DeviceInfo, probe_device
from hpo.errors import Nonfinite, OutOfMemory
from hpo.models.compact_embedding import CompactEmbedding, compact_vocabulary
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.training import loop as loop_module
from hpo.training.compilation import CompileClock
from hpo.training.evaluate import Evaluation, predict_logits
from hpo.training.loop import (
    CHECK_EVERY,
    Budget,
    TrainingArgs,
    TrainingClock,
    TrainingData,
    TrainState,
    accumulate_gradients,
    apply_gradients,
    gradient_norm,
    step_seed,
    train,
)
from hpo.training.losses import LossOptions, count_items, loss_sum
from hpo.training.optim import build_optimizer, parameter_groups
from hpo.training.throughput import ThroughputMeter
from hpo.trial.executor import Executor


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return tiny_executor(tmp_path_factory.mktemp("tiny"))


def config_of(executor: Executor, **params: Any) -> TrialConfig:
    return build_trial_config(executor.study, params, "fp32", executor.amp)


def amp_of(name: str, device: DeviceInfo = CPU) -> MixedPrecision:
    return MixedPrecision(PRECISIONS[name], EMULATED, device)


@pytest.mark.parametrize(("mode", "multiple"), [("none", 1), ("default", 8)])
def test_lengths_are_rounded_only_where_few_shapes_matter(
    executor: Executor, mode: str, multiple: int
) -> None:
    assert executor.tokens("train", config_of(executor, compile=mode)).length_multiple == multiple


def reference_losses(executor: Executor, name: str, num_steps: int, dropout: float) -> list[float]:
    """A plain training loop: one forward, backward and step at a time, for any precision."""
    config = config_of(executor, fp_precision=name, dropout=dropout, head_dropout=dropout)
    precision = PRECISIONS[name]
    split = executor.tokens("train", config)
    torch.manual_seed(config.seed)
    model = executor.build_model(config)
    if precision.weights == "bfloat16":
        model.bfloat16()
    model.train()
    # fp32 moments whatever the weights: update fp32 copies, then round.
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = [weight.detach().float().requires_grad_() for weight in weights]
    decay, rest = [c for c in copies if c.dim() >= 2], [c for c in copies if c.dim() < 2]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate)
    scale = 65536.0 if precision.loss_scaling else 1.0
    losses = []
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
        (loss * scale).backward()
        for weight, copy in zip(weights, copies, strict=True):
            copy.data = weight.detach().float()
            copy.grad = None if weight.grad is None else weight.grad.float() / scale
            weight.grad = None
        losses.append(loss.item())
        gradients = [copy.grad for copy in copies if copy.grad is not None]
        if all(torch.isfinite(gradient).all() for gradient in gradients):
            nn.utils.clip_grad_norm_(copies, config.max_grad_norm)
            optimizer.step()
        else:
            scale /= 2
        with torch.no_grad():
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)
    return losses


def args_of(config: TrialConfig, num_steps: int) -> TrainingArgs:
    """A few steps with one evaluation at their end."""
    return TrainingArgs(
        budget=Budget(max_steps=num_steps),
        batch_size=config.batch_size,
        micro_batch_size=config.batch_size,
        seed=config.seed,
        schedule="linear",
        warmup_ratio=0.1,
        max_grad_norm=config.max_grad_norm,
        num_evaluations=1,
        evaluation_tokens=4096,
    )


def our_losses(executor: Executor, name: str, num_steps: int, dropout: float, **settings: Any) -> list[float]:
    config = config_of(executor, fp_precision=name, dropout=dropout, head_dropout=dropout, **settings)
    split = executor.tokens("train", config)
    torch.manual_seed(config.seed)
    model = executor.build_model(config)
    optimizer = executor.prepare(model, PRECISIONS[name], config, executor.used_ids(config))
    losses: list[float] = []
    loss_fn = executor.loss_fn(config, model, split)
    amp = amp_of(name)
    record = amp.record_step
    amp.record_step = lambda loss, norm: (losses.append(loss.item()), record(loss, norm))[1]  # type: ignore[func-returns-value, method-assign]
    args = args_of(config, num_steps)
    data = TrainingData(split, executor.tokens("validation", config), pad_id=0)
    list(train(model, optimizer, loss_fn, amp, data, args, TrainingClock(TrainState(), ThroughputMeter(CPU))))
    return losses


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_a_plain_loop_has_the_same_losses_step_by_step(executor: Executor, name: str, dropout: float) -> None:
    ours, plain = our_losses(executor, name, 6, dropout), reference_losses(executor, name, 6, dropout)
    assert len(ours) == 6
    assert ours[0] != pytest.approx(ours[-1], rel=1e-3)  # it learns something
    tolerance = 1e-5 if name == "fp32" else 2e-3
    assert ours == pytest.approx(plain, rel=tolerance)


def test_activations_computed_anew_give_the_same_losses(executor: Executor) -> None:
    """With dropout, whose masks are drawn again, under autocast."""
    settings = {"attention_dropout": 0.1, "gradient_checkpointing": True}
    ours = our_losses(executor, "bf16", 4, 0.1, **settings)
    assert ours == pytest.approx(our_losses(executor, "bf16", 4, 0.1, attention_dropout=0.1), rel=1e-5)


def plain_loss_and_gradients(
    model: MultitaskModel, executor: Executor, texts: Sequence[Example], max_length: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """The same weights in transformers' own model with eager attention, the whole embedding table, texts in
    their order padded to `max_length`, and the losses of whole-text tasks spelt out."""
    config = deepcopy(model.encoder.config)
    encoder = AutoModel.from_config(config, attn_implementation="eager", add_pooling_layer=False)
    found = encoder.load_state_dict(model.encoder.state_dict(), strict=False)
    assert not found.missing_keys
    assert all(key.startswith("pooler.") for key in found.unexpected_keys)
    heads = [deepcopy(head[-1]) for head in model.heads]
    tokenizer = executor.tokenizer(config_of(executor))
    inputs = tokenizer(
        [row.text for row in texts],
        truncation=True,
        max_length=max_length,
        padding="max_length",
        return_tensors="pt",
        return_token_type_ids=False,
    )
    hidden = encoder.train()(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None].float()
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    loss = torch.zeros(())
    for task, head in zip(model.tasks, heads, strict=True):
        logits, values = head(pooled), [row.labels[task.name] for row in texts]
        if task.kind == "multi_label":
            truth = torch.tensor([[float(name in held) for name in task.labels] for held in values])
            loss = loss + F.binary_cross_entropy_with_logits(logits, truth, reduction="sum") / len(texts)
        elif task.kind == "single_label":
            loss = loss + F.cross_entropy(logits, torch.tensor([task.labels.index(v) for v in values]))
        else:
            truth = (torch.tensor(values) - task.target_mean) / task.target_std
            loss = loss + F.mse_loss(logits[:, 0], truth)
    loss.backward()
    gradients = {f"encoder.{name}": p.grad for name, p in encoder.named_parameters()}
    for number, head in enumerate(heads):
        gradients |= {f"heads.{number}.{name}": p.grad for name, p in head.named_parameters()}
    return loss.item(), gradients


@pytest.mark.parametrize("micro_batch_size", [16, 5])
@pytest.mark.parametrize("encoder", ["minilm", ENCODER], ids=["minilm", "fresh"])
def test_loss_and_gradients_are_those_of_plain_transformers(
    encoder: Any, micro_batch_size: int, tmp_path: Path
) -> None:
    """In fp32 without dropout: our attention, the rows of the vocabulary that are used and batches padded to
    their longest text change nothing."""
    executor = tiny_executor(tmp_path, model={"encoder": encoder})
    executor.tasks = tuple(task for task in executor.tasks if task.level == "sequence")
    nothing = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
    config = config_of(executor, **nothing, max_length=64, batch_size=16)
    split = executor.tokens("train", config)
    torch.manual_seed(config.seed)
    model = executor.build_model(config)
    for head in model.heads:  # larger than at their start, so that the encoder's gradients are not tiny
        nn.init.normal_(head[-1].weight, std=0.2)
    assert model.encoder.config._attn_implementation == "hpo_sdpa"
    windows = np.argsort(split.lengths_W, kind="stable")[:16]
    plain_loss, plain = plain_loss_and_gradients(
        model, executor, [split.examples[int(split.window_example_W[w])] for w in sorted(windows)], 64
    )

    compact_vocabulary(model, "adamw", split.used_ids)
    embedding: Any = model.encoder.get_input_embeddings()
    assert isinstance(embedding, CompactEmbedding)
    batch = collate(split, windows, executor.tasks, executor.pad_id(config))
    assert batch.input_ids_BL.shape[1] < 64
    loss = accumulate_gradients(
        model.train(),
        executor.loss_fn(config, model, split),
        batch,
        amp_of("fp32"),
        config.seed,
        TrainState(micro_batch_size=micro_batch_size),
    )

    assert float(loss) == pytest.approx(plain_loss, rel=1e-5)
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = {re.sub(r"^heads\.(\d+)\.\d+\.", r"heads.\1.", name): grad for name, grad in ours.items()}
    assert ours.keys() == plain.keys()
    table = plain["encoder.embeddings.word_embeddings.weight"]
    used = embedding.used_ids
    assert table.count_nonzero() == table[used].count_nonzero(), "the rows left out have no gradient"
    plain["encoder.embeddings.word_embeddings.weight"] = torch.cat(
        [table[used], table.new_zeros(1, table.shape[1])]
    )
    largest = max(float(grad.abs().max()) for grad in plain.values())
    assert largest > 0.1
    for name, expected in plain.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-5 * largest, msg=name)


def gradients_of(micro_batch_size: int, tasks: Any = TASKS) -> tuple[float, dict[str, torch.Tensor]]:
    model, batch = tiny_model(tasks=tasks), tiny_batch()
    state = TrainState(micro_batch_size=micro_batch_size)
    loss = accumulate_gradients(model, tiny_objective(tasks), batch, amp_of("fp32"), seed=0, state=state)
    return float(loss), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 5])
def test_micro_batches_give_the_whole_batch_with_missing_labels(micro_batch_size: int) -> None:
    loss, gradients = gradients_of(6)
    micro_loss, micro_gradients = gradients_of(micro_batch_size)
    assert micro_loss == pytest.approx(loss, rel=1e-6)
    assert gradients.keys() == micro_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(micro_gradients[name], gradient, rtol=1e-5, atol=1e-6)


def refuse_above(limit: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the model run out of memory for more than `limit` windows, as the CPU's allocator says it."""
    forward, sizes = MultitaskModel.forward, []

    def limited(self: MultitaskModel, input_ids_BL: torch.Tensor, *args: Any) -> Any:
        sizes.append(len(input_ids_BL))
        if len(input_ids_BL) > limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")
        return forward(self, input_ids_BL, *args)

    monkeypatch.setattr(MultitaskModel, "forward", limited)
    return sizes


def test_out_of_memory_halves_the_micro_batch_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients_of(2)
    sizes = refuse_above(2, monkeypatch)
    found = gradients_of(6)
    assert sizes == [6, 3, 2, 2, 2]
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


def test_one_example_that_does_not_fit_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_above(0, monkeypatch)
    with pytest.raises(OutOfMemory, match="one example of 8 tokens does not fit"):
        gradients_of(6)


def test_another_error_is_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("hpo.models.multitask.MultitaskModel.forward", broken)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gradients_of(6)


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp = amp_of("fp16")
    loss = (weight * torch.tensor([3.0, 4.0])).sum()
    amp.scaler.scale(loss).backward()
    apply_gradients(model, optimizer, loss, amp, max_grad_norm=1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0 - 0.6, 4.0 - 0.8]), rtol=1e-4, atol=1e-4)


def test_uncertainty_weighting_adds_its_terms_once_however_the_batch_is_cut() -> None:
    def total(micro_batch_size: int) -> float:
        loss_fn, state = tiny_objective(), TrainState(micro_batch_size=micro_batch_size)
        loss_fn.log_variance = {task.name: nn.Parameter(torch.tensor(0.3)) for task in TASKS}
        return float(accumulate_gradients(tiny_model(), loss_fn, tiny_batch(), amp_of("fp32"), 0, state))

    plain = gradients_of(6)[0]
    assert total(6) == pytest.approx(np.exp(-0.3) * plain + 4 * 0.3, rel=1e-5)
    assert total(2) == pytest.approx(total(6), rel=1e-6)


def test_a_loss_that_is_not_finite_names_its_task(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loss_sum

    def broken(task: Any, *args: Any) -> torch.Tensor:
        return real(task, *args) * (float("nan") if task.name == "severity" else 1.0)

    monkeypatch.setattr("hpo.training.losses.loss_sum", broken)
    with pytest.raises(Nonfinite, match=r"in 3 steps in a row\. First in: severity\."):
        our_losses(executor, "fp32", 6, 0.0)


@pytest.mark.parametrize(
    ("budget", "state", "used"),
    [
        (Budget(epochs=2), TrainState(step=5), 0.25),
        (Budget(epochs=0.5), TrainState(step=5), 1.0),
        (Budget(max_steps=20), TrainState(step=5), 0.25),
        (Budget(max_seconds=8), TrainState(step=5, train_seconds=2), 0.25),
    ],
)
def test_the_share_of_a_budget_that_is_used(budget: Budget, state: TrainState, used: float) -> None:
    assert budget.used(state, steps_per_epoch=10) == pytest.approx(used)


@pytest.mark.parametrize("num_steps", [1, 7, 22, 28, 66, 100, 264, 997])
def test_evaluations_come_after_their_exact_steps(num_steps: int) -> None:
    for budget in (Budget(max_steps=num_steps), Budget(epochs=num_steps / 10)):
        for count in range(1, 65):
            state, made = TrainState(), []
            for state.step in range(1, num_steps + 1):
                due = budget.evaluations_due(state, 10, count)
                if due > state.num_evaluations:
                    made.append(state.step)
                state.num_evaluations = due
            expected = {math.ceil(Fraction(n * num_steps, count)) for n in range(1, count + 1)}
            assert made == sorted(expected), count
            assert state.num_evaluations == count


def test_the_last_evaluation_of_a_budget_of_seconds_is_at_its_end() -> None:
    budget = Budget(max_seconds=10.0)
    for seconds, due in ((0.0, 0), (4.9, 1), (5.0, 2), (9.999999999999998, 3), (10.0, 4), (11.0, 4)):
        assert budget.evaluations_due(TrainState(train_seconds=seconds), 10, 4) == due


def test_a_trial_is_evaluated_where_it_should_be(tmp_path: Path) -> None:
    settings = {"batch_size": 8, "max_length": 64, "max_steps": 22}
    executor = tiny_executor(tmp_path, training=settings, evaluation={"per_trial": 22})
    steps: list[int] = []
    result = executor.run(
        {"learning_rate": 1e-4},
        tmp_path / "trial",
        "key",
        on_evaluation=lambda scored: steps.append(scored.evaluation.step),
    )
    assert (result.outcome, steps) == ("complete", [*range(1, 23)])


def test_the_train_loss_of_a_resumed_trial_is_that_of_an_uninterrupted_one(
    executor: Executor, tmp_path: Path
) -> None:
    def losses_of(folder: Path, stop_after: int) -> list[float]:
        losses: list[float] = []
        asked: list[None] = []
        executor.run(
            {"learning_rate": 1e-3, "fp_precision": "fp32"},
            folder,
            "key",
            on_evaluation=lambda scored: losses.append(scored.evaluation.train_loss),
            should_stop=lambda: asked.append(None) or len(asked) == stop_after,
        )
        return losses

    whole = losses_of(tmp_path / "whole", 0)
    assert losses_of(tmp_path / "cut", 3) == []
    assert losses_of(tmp_path / "cut", 0) == pytest.approx(whole, rel=1e-12)


def test_every_step_draws_from_a_seed_of_its_own() -> None:
    """A CPU's generator takes the lower 32 bits of a seed."""
    torch.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5 + 2**40)
    assert torch.equal(torch.rand(3), first)
    for seed in (0, 42):
        assert len({step_seed(seed, step) % 2**32 for step in range(10**6)}) == 10**6
    shared = {step_seed(0, step) for step in range(10**4)} & {step_seed(1, step) for step in range(10**4)}
    assert not shared


def train_for_seconds(
    executor: Executor,
    monkeypatch: pytest.MonkeyPatch,
    clock: TrainingClock,
    on_step: Callable[[], None],
    on_evaluation: Callable[[], None],
    num_evaluations: int,
) -> list[Evaluation]:
    """Train for 4.5 seconds with something done in each step and each evaluation."""
    config = config_of(executor)
    split = executor.tokens("train", config)
    model = executor.build_model(config)
    amp = amp_of("fp32")
    record, evaluate = amp.record_step, loop_module.evaluate
    amp.record_step = lambda *args: (on_step(), record(*args))[1]  # type: ignore[func-returns-value, method-assign]
    monkeypatch.setattr(
        loop_module, "evaluate", lambda *args, **more: (on_evaluation(), evaluate(*args, **more))[1]
    )
    optimizer = build_optimizer("adamw", parameter_groups(model, learning_rate=1e-4))
    data = TrainingData(split, executor.tokens("validation", config), pad_id=0)
    args = replace(args_of(config, 1), budget=Budget(max_seconds=4.5), num_evaluations=num_evaluations)
    return list(train(model, optimizer, executor.loss_fn(config, model, split), amp, data, args, clock))


def test_compiling_in_a_step_is_no_training(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take a second each; in the second one and in the evaluation 1000 more go to the compiler."""
    now, compiler = [0.0], CompileClock()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def spend(seconds: float, compiling: float) -> None:
        now[0] += seconds + compiling
        compiler.seconds += compiling

    state, meter = TrainState(), ThroughputMeter(CPU, warmup_steps=0)
    (last,) = train_for_seconds(
        executor,
        monkeypatch,
        TrainingClock(state, meter, compiler),
        lambda: spend(1.0, 1000.0 * (state.step == 1)),
        lambda: spend(2.0, 1000.0),
        num_evaluations=1,
    )
    assert compiler.seconds == 2000.0
    assert (state.step, state.train_seconds, state.evaluation_seconds) == (5, 5.0, 2.0)
    assert last.examples_per_second == len(executor.tokens("validation", config_of(executor)).examples) / 2
    assert (meter.measured_seconds, last.rates["step_seconds_p95"]) == (4.0, pytest.approx(1.0, rel=0.01))


def test_waiting_for_the_device_may_use_up_the_budget(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation before which it is waited for is then the last of the trial, and says so."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(loop_module, "synchronize", lambda _: spend(10.0))
    clock = TrainingClock(TrainState(), ThroughputMeter(CPU))
    (only,) = train_for_seconds(
        executor, monkeypatch, clock, lambda: spend(1.0), lambda: spend(1.0), num_evaluations=2
    )
    assert (only.step, only.index, only.budget_used) == (3, 2, 1.0)


# Waiting for a GPU


class Enough(Exception):
    """The steps that a test wants have been run."""


def run_steps(
    executor: Executor,
    device: DeviceInfo,
    name: str,
    *,
    stop_after: int,
    watch_from: int = 0,
    **settings: Any,
) -> tuple[int, list[int]]:
    """Train on `device` and watch, from a step on, all steps that do not look at what came out.

    Returns the steps that were run, and which of them were watched.
    """
    config = config_of(executor, fp_precision=name, dropout=0.1, head_dropout=0.1, **settings)
    split = executor.tokens("train", config)
    torch.manual_seed(config.seed)
    model = prepare_model(executor.build_model(config), PRECISIONS[name])
    compact_vocabulary(model, config.optimizer, split.used_ids)
    model.to(device.torch_device)
    optimizer = build_optimizer(config.optimizer, parameter_groups(model, learning_rate=1e-4))
    amp = amp_of(name, device)
    state = TrainState()
    watched: list[int] = []
    watching: list[Any] = []

    def watch_next() -> None:
        if watching:
            watching.pop().__exit__(None, None, None)
        if state.step >= watch_from and (state.step + 1) % CHECK_EVERY[device.type]:
            watching.append(watch(device))
            watching[-1].__enter__()
            watched.append(state.step)

    def on_step() -> bool:
        watch_next()
        if state.step == stop_after:
            raise Enough
        return False

    # So long that no evaluation comes.
    args = replace(args_of(config, 10 * stop_after), micro_batch_size=config.batch_size // 2)
    meter = ThroughputMeter(CPU if device is META_GPU else device)
    loss_fn = executor.loss_fn(config, model, split)
    data, clock = TrainingData(split, split, pad_id=0), TrainingClock(state, meter)
    watch_next()
    try:
        with pytest.raises(Enough), backend_flags(PRECISIONS[name], EMULATED):
            list(train(model, optimizer, loss_fn, amp, data, args, clock, on_step))
    finally:
        if watching:
            watching.pop().__exit__(None, None, None)
    return state.step, watched


def watch(device: DeviceInfo) -> Any:
    return no_waiting() if device is META_GPU else errors_on_sync()


@contextmanager
def errors_on_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("name", "pooling"), [("fp32", "mean"), ("fp32", "max"), ("fp32", "attention"), ("bf16-true", "mean")]
)
def test_no_step_reads_what_a_device_computes(executor: Executor, name: str, pooling: str) -> None:
    steps = CHECK_EVERY["cuda"] - 1
    found = run_steps(executor, META_GPU, name, stop_after=steps, pooling=pooling, optimizer="lion")
    assert found == (steps, [*range(steps)])


@pytest.mark.parametrize("loss", ["auto", "focal"])
def test_no_loss_reads_what_a_device_computes(loss: str) -> None:
    model = tiny_model().to("meta")
    loss_fn = tiny_objective(loss=loss, label_smoothing=0.1)
    amp = amp_of("fp32", META_GPU)
    with no_waiting():
        accumulate_gradients(model, loss_fn, tiny_batch(), amp, 0, TrainState(micro_batch_size=4))
    with pytest.raises(WaitsForDevice), no_waiting():
        loss_fn.nonfinite_tasks()


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_no_update_reads_what_a_device_computes(name: str, optimizer: str) -> None:
    """With the fused kernels and the real scaler, on values: here the CPU is the device."""
    model = prepare_model(tiny_model(), PRECISIONS[name])
    groups = parameter_groups(model, learning_rate=1e-3)
    update, amp = build_optimizer(optimizer, groups), amp_of(name)
    state = TrainState(micro_batch_size=6)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(3):
        amp.device = CPU
        loss = accumulate_gradients(model, tiny_objective(), tiny_batch(), amp, step, state)
        amp.device = replace(CPU, type="cuda")
        with no_waiting("cpu"):
            apply_gradients(model, update, loss, amp, max_grad_norm=1.0)
    assert not all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("device", "dtypes"),
    [
        ("cuda", (torch.float32,)),
        ("cpu", (torch.float32,)),
        ("cpu", (torch.bfloat16,)),
        ("cpu", (torch.bfloat16, torch.float32)),
    ],
)
def test_the_norm_of_gradients_is_that_in_fp64(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    shapes = [(300, 400), (7,), (), (1, 50)]
    gradients = [torch.randn(shape).to(dtype) * 1e-3 for shape in shapes for dtype in dtypes]
    gradients.append(torch.randn(20, 30).to(dtypes[0]).t())
    expected = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    norm = gradient_norm(gradients, device)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3, 1.0, 1e3])
def test_gradients_are_clipped_to_their_norm(max_grad_norm: float) -> None:
    model = tiny_model()
    update = build_optimizer("sgd", parameter_groups(model, learning_rate=0.0))
    amp = amp_of("fp32")
    loss = accumulate_gradients(model, tiny_objective(), tiny_batch(), amp, 0, TrainState(micro_batch_size=6))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    clipped = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(clipped, gradients, strict=True):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(clipped, max_grad_norm or float("inf"))
    apply_gradients(model, update, loss, amp, max_grad_norm)
    for parameter, gradient in zip(clipped, gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_an_optimizer_that_is_not_fused_asks_the_scaler_whether_to_step() -> None:
    model = tiny_model()
    update = build_optimizer("lion", parameter_groups(model, learning_rate=1e-3))
    amp = amp_of("fp16")
    loss = accumulate_gradients(model, tiny_objective(), tiny_batch(), amp, 0, TrainState(micro_batch_size=6))
    with pytest.raises(WaitsForDevice), no_waiting("cpu"):
        apply_gradients(model, update, loss, amp, max_grad_norm=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "bf16-true", "fp16"])
def test_a_gpu_waits_in_no_step_but_those_that_check(executor: Executor, name: str) -> None:
    every, warm_up, steps = CHECK_EVERY["cuda"], 5, 60
    expected = [step for step in range(warm_up, steps) if (step + 1) % every]
    ran, watched = run_steps(executor, probe_device("cuda"), name, stop_after=steps, watch_from=warm_up)
    assert (ran, watched[: len(expected)]) == (steps, expected)


class Conversions(TorchDispatchMode):
    """Counts conversions between dtypes, by the address of what was converted."""

    def __init__(self) -> None:
        super().__init__()
        self.count_of: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype):
            self.count_of[args[0].data_ptr()] += 1
        return function(*args, **(kwargs or {}))


def test_an_evaluation_converts_each_weight_once(executor: Executor) -> None:
    config = config_of(executor)
    split = executor.tokens("validation", config)
    model = executor.build_model(config)
    longest = int(split.lengths_W.max())
    assert len(evaluation_batches(split.lengths_W, longest)) > 1
    with Conversions() as seen:
        predict_logits(model, split, executor.tasks, amp_of("bf16"), longest, pad_id=0)
    trained = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    assert {seen.count_of[weight.data_ptr()] for weight in trained} == {1}


@pytest.mark.parametrize("config", [EMULATED, EMULATED.model_copy(update={"fallback_to_fp32": True})])
def test_an_evaluation_sees_the_weights_as_they_are(executor: Executor, config: AmpConfig) -> None:
    """What autocast has converted for one evaluation is of no use to the next, nor to training."""
    settings = config_of(executor, dropout=0.0, head_dropout=0.0, attention_dropout=0.0)
    split = executor.tokens("validation", settings)
    model = executor.build_model(settings)
    mixed_precision = MixedPrecision(PRECISIONS["bf16"], config, CPU)

    def logits_of(some: MultitaskModel) -> Any:
        return predict_logits(some, split, executor.tasks, mixed_precision, 4096, pad_id=0)

    before = logits_of(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)
    after, fresh = logits_of(model), logits_of(deepcopy(model))
    for name in after:
        assert not np.array_equal(before[name], after[name])
        assert np.array_equal(after[name], fresh[name])
    batch = collate(split, np.arange(4), executor.tasks, 0)
    loss_fn = executor.loss_fn(settings, model, split)
    gradients = []
    for some in (model, deepcopy(model)):
        state = TrainState(micro_batch_size=4)
        accumulate_gradients(some.train(), loss_fn, batch, mixed_precision, 0, state)
        gradients.append([weight.grad for weight in some.parameters() if weight.grad is not None])
    assert gradients[0]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
