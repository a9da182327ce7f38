"""The training loop: steps and evaluations of one trial, as a generator; it knows no Optuna.

What the loop promises:

- A global batch is one optimiser step however it is cut into micro-batches, also where labels are missing
  (`hpo.training.losses`).
- Every step draws its dropout masks from a generator seeded by (seed, step), and every epoch its batches
  by (seed, epoch): the same after a resume from a checkpoint or a repeated step that ran out of memory.
- The learning rate follows the share of the budget that is used up (`hpo.training.optim`).
- With the fused optimisers only every `CHECK_EVERY`-th step waits for the device (and the fp32 fallback,
  which must know whether a loss is finite).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from hpo.data.batches import Batch, collate, evaluation_batches, num_batches
from hpo.device import synchronize
from hpo.errors import Nonfinite
from hpo.lost_device import raise_if_lost
from hpo.models.attention import sdpa_in_place_of_flash
from hpo.models.encoder import without_gradient_checkpointing
from hpo.precision.amp import MixedPrecision, backend_flags
from hpo.precision.table import PRECISIONS
from hpo.random_numbers import manual_seed
from hpo.tasks.tokenized_split import IntArray
from hpo.training.decoding import decode_tasks
from hpo.training.distributed import (
    NO_HALVING,
    GradientSum,
    add_up,
    decide,
    memory_agreed,
    merge,
    rank,
    rows_of_rank,
    world_size,
)
from hpo.training.evaluate import Evaluation, check_finite, predict_logits, scores_by_source
from hpo.training.losses import MultitaskLoss
from hpo.training.metrics import score
from hpo.training.micro_batches import within_memory
from hpo.training.optim import (
    gradient_norm,
    is_fused,
    schedule_factor,
    set_learning_rate,
    step_unless,
)
from hpo.training.progress import Budget, TrainingClock, TrainState
from hpo.training.step_graphs import StepGraphs
from hpo.training.step_seed import step_seed
from hpo.training.training_data import TrainingData

CHECK_EVERY = {"cpu": 1, "cuda": 20}
"""Steps between two looks at whether losses and gradients are finite; on a GPU a look waits for it."""

_logger = logging.getLogger(__name__)


class Learner(NamedTuple):
    """A model, its loss, and the precision that both are computed in."""

    model: nn.Module
    loss_fn: MultitaskLoss
    mixed_precision: MixedPrecision


@dataclass(frozen=True)
class TrainingArgs:
    """The settings of the loop."""

    budget: Budget
    batch_size: int
    micro_batch_size: int
    """Of a trial that has not run out of memory."""
    seed: int
    schedule: str | Callable[[float], float]
    warmup_ratio: float
    max_grad_norm: float
    evaluate_at: tuple[Fraction, ...]
    """Shares of the budget at which there is an evaluation; the last is 1."""
    evaluation_tokens: int
    """Padded tokens in one evaluation batch."""
    decision_metrics: Mapping[str, str]
    """{task: metric} that thresholds and the like maximise; a task left out: its primary metric."""
    cuda_graphs: bool = False
    """Whether passes are replayed as CUDA graphs where the device has them."""


AfterStep = Literal["", "interrupted", "ended"]


@dataclass(frozen=True)
class TrainingHooks:
    """What is called while a trial trains.

    What a hook raises ends the training, with model, optimiser and state as the last whole step left them; an
    evaluation that was left is made when the training goes on.
    """

    on_step: Callable[[], AfterStep] = lambda: ""
    """After each step but the last, by rank 0. `interrupted`: it took its time (the copy for a checkpoint),
    which then counts as no training. `ended`: the training ends with an evaluation now."""
    on_micro_batch: Callable[[], None] = lambda: None
    """Between the micro-batches of a step and before the batches of an evaluation. It must do nothing where
    there are several ranks."""


def train(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    data: TrainingData,
    args: TrainingArgs,
    clock: TrainingClock,
    hooks: TrainingHooks = TrainingHooks(),
) -> Iterator[Evaluation]:
    """Train until the budget is used up, yielding an evaluation of the validation split at a time.

    The model is on the device, in the precision's weights. `clock.state` says where to begin and is kept up
    to date. Several ranks that train together call this with the same arguments; the clock is rank 0's.

    Raises Nonfinite when loss, gradients or metrics stay NaN or infinite, after it repeated the step in fp32,
    and OutOfMemory when a single example does not fit.
    """
    model, loss_fn, mixed_precision = learner
    state, budget = clock.state, args.budget
    state.micro_batch_size = state.micro_batch_size or args.micro_batch_size
    sum_gradients = GradientSum(model)
    batches = data.batches(args.batch_size, args.seed, state.epoch)
    first_step, batch, graphs = state.step, None, build_graphs(learner, args)

    model.train()
    clock.start()
    while True:
        evaluates = budget.evaluations_due(state, args.evaluate_at) > state.num_evaluations
        if evaluates:
            _check(learner, batch, args, state)
            yield _evaluate(learner, data, args, clock, hooks.on_micro_batch)
            model.train()
        if budget.used(state) >= 1:
            return
        after = decide(hooks.on_step) if state.step > first_step else ""
        if after == "ended":
            if not evaluates:
                _check(learner, batch, args, state)
                yield _evaluate(learner, data, args, clock, hooks.on_micro_batch, is_extra=True)
            return
        if after or evaluates:
            clock.start()

        if state.batch == 0:
            mixed_precision.start_epoch()
        position = budget.learning_rate_position(state)
        set_learning_rate(optimizer, schedule_factor(args.schedule, position, args.warmup_ratio))
        windows = batches[state.batch]
        batch = collate(data.train, windows, loss_fn.tasks, data.pad_id)
        loss = accumulate_gradients(learner, batch, args.seed, state, hooks.on_micro_batch, graphs)
        sum_gradients()
        with memory_agreed(NO_HALVING):
            apply_gradients(model, optimizer, loss, mixed_precision, args.max_grad_norm)
        num_examples = float(data.train.example_share_W[windows].sum())
        state.count_step(loss, num_examples, batch.num_tokens)
        clock.step(num_examples, batch, interrupted=_note_graphs(graphs, state))
        if state.step % CHECK_EVERY[mixed_precision.device.type] == 0:
            _check(learner, batch, args, state)
        state.step_seconds = _lap(clock)
        if state.batch == len(batches):
            state.epoch, state.batch = state.epoch + 1, 0
            batches = data.batches(args.batch_size, args.seed, state.epoch)


def _note_graphs(graphs: StepGraphs | None, state: TrainState) -> bool:
    """Note the graphs in the state. Returns whether the last step recorded any, or failed to."""
    before, now = (state.num_graphs, state.graph_problem), (0, "")
    if graphs is not None:
        now = graphs.num_recorded, graphs.problem
    state.num_graphs, state.graph_problem = now
    return now != before


def _lap(clock: TrainingClock) -> float:
    """`clock.lap()` as rank 0 has it: learning rates and the end of the budget may follow from it."""
    seconds = clock.lap()
    clock.state.train_seconds, seconds = decide(lambda: (clock.state.train_seconds, seconds))
    return seconds


def _evaluate(
    learner: Learner,
    data: TrainingData,
    args: TrainingArgs,
    clock: TrainingClock,
    on_batch: Callable[[], None],
    *,
    is_extra: bool = False,
) -> Evaluation:
    """Evaluate the validation split. `is_extra`: no evaluation is due, as the training ends early."""
    model, loss_fn, mixed_precision = learner
    synchronize(mixed_precision.device)
    clock.meter.stop()
    _lap(clock)
    budget, state, began = args.budget, clock.state, clock.now()
    index = state.num_evaluations + 1 if is_extra else budget.evaluations_due(state, args.evaluate_at)
    split = data.validation
    batches = evaluation_batches(split.lengths_W, args.evaluation_tokens)[rank() :: world_size()]
    with memory_agreed("Shorten `max_length`."):
        logits = predict_logits(model, split, batches, mixed_precision, data.pad_id, on_batch)
    synchronize(mixed_precision.device)
    forward_seconds = clock.now() - began
    merge(logits)
    with repeated_in_fp32(mixed_precision, partial(_evaluates_finite, learner, data, batches)):
        check_finite(logits)
    predictions, decisions = decode_tasks(loss_fn.tasks, logits, split, metrics=args.decision_metrics)
    metrics = {task.name: score(task, predictions[task.name], split.examples) for task in loss_fn.tasks}
    by_source = scores_by_source(loss_fn.tasks, predictions, split.examples, data.validation_rows)
    seconds = clock.now() - began
    state.num_evaluations = index
    state.evaluation_seconds += seconds
    state.evaluation_scoring_seconds += seconds - forward_seconds
    return Evaluation(
        step=state.step,
        epoch=state.step / num_batches(data.train.num_windows, args.batch_size),
        budget_used=min(1.0, budget.used(state)),
        seconds=state.train_seconds,
        metrics=metrics,
        decisions=decisions,
        examples_per_second=len(split.examples) / forward_seconds,
        train_loss=state.take_mean_loss(),
        index=index,
        rates=clock.meter.summary(),
        source_metrics=by_source,
    )


def _check(learner: Learner, batch: Batch | None, args: TrainingArgs, state: TrainState) -> None:
    """Raise Nonfinite if the training cannot recover. `batch` is that of the last step; None: unknown."""
    with repeated_in_fp32(learner.mixed_precision, partial(_steps_finite, learner, batch, args, state)):
        learner.mixed_precision.check()


@contextlib.contextmanager
def repeated_in_fp32(mixed_precision: MixedPrecision, repeat: Callable[[], bool | None]) -> Iterator[None]:
    """Note on a Nonfinite of the block whether the numbers are finite when `repeat` computes them in fp32.

    They are not repeated by several ranks.
    """
    try:
        yield
    except Nonfinite as error:
        if mixed_precision.has_fp32_repeat and world_size() == 1:
            try:
                error.finite_in_fp32 = repeat()
            except Exception as fault:  # whatever the repeat raises, the trial has ended
                raise_if_lost(mixed_precision.device, fault)
                _logger.warning("The step that broke could not be repeated in fp32: %r", fault)
        raise


def _steps_finite(
    learner: Learner, batch: Batch | None, args: TrainingArgs, state: TrainState
) -> bool | None:
    """Repeat the last step in fp32. None: another step broke, or the weights have changed since."""
    if batch is None or not bool(learner.mixed_precision.last_skipped):
        return None
    state, model = replace(state), learner.model  # a copy, as the repeat may need smaller micro-batches
    in_fp32 = partial(_in_fp32, learner, scale=lambda loss: loss)

    def attempt() -> Tensor:
        manual_seed(step_seed(args.seed, state.step - 1, rank()))
        model.zero_grad(set_to_none=True)
        return _accumulate(learner, batch, state.micro_batch_size, lambda: None, in_fp32)

    loss = within_memory(attempt, state, batch)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = gradient_norm(gradients, learner.mixed_precision.device.type)
    return bool(torch.isfinite(loss + norm))


def _evaluates_finite(learner: Learner, data: TrainingData, batches: Sequence[IntArray]) -> bool | None:
    """Repeat an evaluation in fp32. None: the weights themselves have fewer bits."""
    model, _, mixed_precision = learner
    config, fp32 = mixed_precision.config, PRECISIONS["fp32"]
    if mixed_precision.precision.weights != fp32.weights:
        return None
    in_fp32 = MixedPrecision(fp32, config, mixed_precision.device)
    with backend_flags(fp32, config), sdpa_in_place_of_flash(model.encoder):
        logits = predict_logits(model, data.validation, batches, in_fp32, data.pad_id)
    return all(np.isfinite(values).all() for values in logits.values())


def accumulate_gradients(
    learner: Learner,
    batch: Batch,
    seed: int,
    state: TrainState,
    on_micro_batch: Callable[[], None] = lambda: None,
    graphs: StepGraphs | None = None,
) -> Tensor:
    """Forward and backward over the global batch in micro-batches; return its loss, detached.

    If memory runs out, `graphs` give up theirs, or the micro-batch is halved, and the batch is done again.
    `on_micro_batch` runs between micro-batches. Each of several ranks has the gradients of its rows, and the
    loss of all; there the micro-batch is not halved. Raises OutOfMemory.
    """
    model, _, mixed_precision = learner
    run = graphs or partial(forward_backward, learner)

    def attempt() -> Tensor:
        manual_seed(step_seed(seed, state.step, rank()))
        model.zero_grad(set_to_none=True)
        mixed_precision.start_step()
        return _accumulate(learner, batch, state.micro_batch_size, on_micro_batch, run)

    loss = within_memory(attempt, state, batch, graphs.release if graphs else lambda: False)
    fallbacks = torch.tensor(mixed_precision.step_fallbacks)
    mixed_precision.end_step(int(add_up(fallbacks)) if mixed_precision.config.fallback_to_fp32 else 0)
    return add_up(loss)


def _accumulate(
    learner: Learner,
    batch: Batch,
    micro_batch_size: int,
    on_micro_batch: Callable[[], None],
    run: Callable[..., Tensor],
) -> Tensor:
    """Run this rank's rows in micro-batches and return their loss, detached.

    `run` is `forward_backward` of the learner, or takes its place.
    """
    _, loss_fn, mixed_precision = learner
    device, num_items = mixed_precision.device.torch_device, loss_fn.count(batch)
    total = torch.zeros((), device=device)
    parts = rows_of_rank(batch).split(micro_batch_size)
    for number, part in enumerate(parts):
        if number:
            on_micro_batch()
        share = len(part.windows_B) / len(batch.windows_B)
        total += run(part.to(device), num_items, share)
    return total


def build_graphs(learner: Learner, args: TrainingArgs) -> StepGraphs | None:
    """The CUDA graphs of a trial; None where its passes are not to be recorded, or cannot be."""
    device, config = learner.mixed_precision.device, learner.mixed_precision.config
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    # The fp32 fallback waits for each loss. Several ranks agree between their passes.
    if not (args.cuda_graphs and is_nvidia) or config.fallback_to_fp32 or world_size() > 1:
        return None
    return StepGraphs(learner.model, partial(forward_backward, learner), device)


def forward_backward(
    learner: Learner, batch: Batch, num_items: Mapping[str, int | Tensor], share: float | Tensor
) -> Tensor:
    """Run a micro-batch forward and backward under the trial's precision; return its loss, detached.

    If the loss is not finite and the config has a fallback, both passes run in fp32. The other arguments are
    those of `MultitaskLoss`.
    """
    model, loss_fn, mixed_precision = learner
    return backward(
        mixed_precision,
        lambda: loss_fn(model(*batch.inputs), batch, num_items, share),
        lambda: _in_fp32(learner, batch, num_items, share, mixed_precision.scaler.scale),
    )


def backward(
    mixed_precision: MixedPrecision, loss_of: Callable[[], Tensor], repeat_in_fp32: Callable[[], Tensor]
) -> Tensor:
    """Run `loss_of` under autocast and its scaled loss backward; return the loss, detached.

    If the loss is not finite and the config has a fallback, `repeat_in_fp32` does both and returns its loss.
    """
    with mixed_precision.autocast():
        loss = loss_of()
    if not mixed_precision.falls_back(loss):
        mixed_precision.scaler.scale(loss).backward()
        return loss.detach()
    loss = repeat_in_fp32()
    if not bool(torch.isfinite(loss)):  # no fault of the precision
        mixed_precision.step_fallbacks -= 1
    return loss


def _in_fp32(
    learner: Learner,
    batch: Batch,
    num_items: Mapping[str, int | Tensor],
    share: float | Tensor,
    scale: Callable[[Tensor], Tensor],
) -> Tensor:
    model, loss_fn, mixed_precision = learner
    # The fp32 weights are in the model for its forward pass alone, so the backward pass must compute no
    # activations again.
    kept = without_gradient_checkpointing(model)
    with kept, sdpa_in_place_of_flash(model.encoder), mixed_precision.float32(model) as model_in_float32:
        loss = loss_fn(model_in_float32(*batch.inputs), batch, num_items, share)
        scale(loss).backward()
    return loss.detach()


def apply_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    mixed_precision: MixedPrecision,
    max_grad_norm: float,
) -> None:
    """Unscale, clip to the global norm, step, update the scale: in this order (PyTorch, AMP examples)."""
    scaler, device_type = mixed_precision.scaler, mixed_precision.device.type
    scaler.unscale_(optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = gradient_norm([cast(Tensor, parameter.grad) for parameter in parameters], device_type)
    # A GPU clips always: to know whether there is anything to clip would mean to wait for it.
    clips = bool(max_grad_norm) and (device_type != "cpu" or not norm <= max_grad_norm)
    if is_fused(optimizer) and not scaler.is_enabled():
        # PyTorch's fused optimisers divide by this as they read the gradients.
        cast(Any, optimizer).grad_scale = ((norm + 1e-6) / max_grad_norm).clamp(min=1) if clips else None
    elif clips:
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    found_inf = mixed_precision.record_step(loss, norm)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    else:
        step_unless(optimizer, found_inf)
