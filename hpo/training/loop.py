"""The training loop: a generator of the evaluations of one trial. It knows no Optuna.

- A global batch is one optimiser step under every micro-batch size, also with missing labels
  (`hpo.training.losses`).
- Seeds of dropout masks come from (seed, step), and of an epoch's batches from (seed, epoch). They are the
  same after a resume and in a repeated step.
- The learning rate follows the used share of the budget (`hpo.training.optim`).
- With fused optimisers, only every `CHECK_EVERY`-th step waits for the device. The fp32 fallback waits for
  each loss.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from hpo.random_numbers import manual_seed, step_seed
from hpo.tasks.tokenized_split import IntArray
from hpo.training.budget import Budget, TrainState
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
from hpo.training.evaluate import (
    Evaluation,
    check_finite,
    class_probabilities,
    decode_tasks,
    predict_logits,
    scores_by_source,
)
from hpo.training.losses import MultitaskLoss
from hpo.training.metrics import score
from hpo.training.micro_batches import within_memory
from hpo.training.optim import gradient_norm, is_fused, schedule_factor, set_learning_rate, step_unless
from hpo.training.step_graphs import StepGraphs
from hpo.training.throughput import TrainingClock
from hpo.training.training_data import TrainingData

CHECK_EVERY = {"cpu": 1, "cuda": 20}
"""Steps between two checks of finite losses and gradients. A check waits for the GPU."""

_logger = logging.getLogger(__name__)


class Learner(NamedTuple):
    """A model, its loss, and the precision of both."""

    model: nn.Module
    loss_fn: MultitaskLoss
    mixed_precision: MixedPrecision


@dataclass(frozen=True)
class TrainingArgs:
    """The settings of the loop."""

    budget: Budget
    batch_size: int
    micro_batch_size: int
    """Initial size. It is halved if memory runs out."""
    seed: int
    schedule: str | Callable[[float], float]
    warmup_ratio: float
    max_grad_norm: float
    evaluate_at: tuple[Fraction, ...]
    """Shares of the budget with an evaluation. The last is 1."""
    evaluation_tokens: int
    """Padded tokens in one evaluation batch."""
    decision_metrics: Mapping[str, str]
    """{task: metric to maximise by thresholds}. Default: the task's primary metric."""
    cuda_graphs: bool = False
    """Replay passes as CUDA graphs if the device has them."""


AfterStep = Literal["", "interrupted", "ended"]


@dataclass(frozen=True)
class TrainingHooks:
    """Functions to call during a training.

    An exception ends the training in the state of the last whole step. A resumed training makes a missed
    evaluation.
    """

    on_step: Callable[[], AfterStep] = lambda: ""
    """Called by rank 0 after each step except the last. `interrupted`: its time (the copy for a checkpoint)
    does not count as training. `ended`: the training ends now with an evaluation."""
    on_micro_batch: Callable[[], None] = lambda: None
    """Called between micro-batches. It must do nothing with several ranks."""
    on_evaluation_batch: Callable[[float], None] = lambda _: None
    """Called before evaluation batches, with the finished share. It must not raise with several ranks."""


def train(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    data: TrainingData,
    args: TrainingArgs,
    clock: TrainingClock,
    hooks: TrainingHooks = TrainingHooks(),
) -> Iterator[Evaluation]:
    """Train to the end of the budget and yield the evaluations of the validation split.

    The model is on the device, in the precision's weights. The training begins at `clock.state` and updates
    it. All ranks call this with the same arguments, but rank 0 has the clock.

    Raises Nonfinite if loss, gradients or metrics stay NaN or infinite, after a repetition in fp32, and
    OutOfMemory if a single example does not fit.
    """
    model, loss_fn, mixed_precision = learner
    state, budget = clock.state, args.budget
    state.micro_batch_size = state.micro_batch_size or args.micro_batch_size
    sum_gradients = GradientSum(model)
    batches = data.batches(args.batch_size, args.seed, state.epoch)
    first_step, batch, graphs = state.step, None, build_graphs(learner, args)

    model.train()
    mixed_precision.follow(model)
    clock.start()
    while True:
        evaluates = budget.evaluations_due(state, args.evaluate_at) > state.num_evaluations
        if evaluates:
            _check(learner, batch, args, state)
            yield _evaluate(learner, data, args, clock, hooks.on_evaluation_batch)
            model.train()
        if budget.used(state) >= 1:
            return
        after = decide(hooks.on_step) if state.step > first_step else ""
        if after == "ended":
            if not evaluates:
                _check(learner, batch, args, state)
                yield _evaluate(learner, data, args, clock, hooks.on_evaluation_batch, is_extra=True)
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
            apply_gradients(model.parameters(), optimizer, loss, mixed_precision, args.max_grad_norm)
        num_examples = float(data.train.example_share_W[windows].sum())
        state.count_step(loss, num_examples, batch.num_tokens)
        clock.step(num_examples, batch, interrupted=_note_graphs(graphs, state))
        if state.step % CHECK_EVERY[mixed_precision.device.type] == 0:
            _check(learner, batch, args, state)
        state.step_seconds = clock.lap()
        if state.batch == len(batches):
            state.epoch, state.batch = state.epoch + 1, 0
            batches = data.batches(args.batch_size, args.seed, state.epoch)


def _note_graphs(graphs: StepGraphs | None, state: TrainState) -> bool:
    """Record the number of graphs in the state. Return whether the last step tried to record any."""
    state.num_graphs, state.graph_problem = (graphs.num_recorded, graphs.problem) if graphs else (0, "")
    return graphs is not None and graphs.take_tried()


def _evaluate(
    learner: Learner,
    data: TrainingData,
    args: TrainingArgs,
    clock: TrainingClock,
    on_batch: Callable[[float], None],
    *,
    is_extra: bool = False,
) -> Evaluation:
    """Evaluate the validation split. `is_extra`: no evaluation is due, but the training ends early."""
    model, loss_fn, mixed_precision = learner
    synchronize(mixed_precision.device)
    clock.meter.stop()
    clock.lap()
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
    likely = class_probabilities(loss_fn.tasks, logits, split)
    metrics = {
        task.name: score(task, predictions[task.name], split.examples, likely.get(task.name))
        for task in loss_fn.tasks
    }
    by_source = scores_by_source(loss_fn.tasks, predictions, likely, split.examples, data.validation_rows)
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
    """Raise Nonfinite if the training cannot recover. `batch` is the last step's; None: unknown."""
    with repeated_in_fp32(learner.mixed_precision, partial(_steps_finite, learner, batch, args, state)):
        learner.mixed_precision.check()


@contextlib.contextmanager
def repeated_in_fp32(mixed_precision: MixedPrecision, repeat: Callable[[], bool | None]) -> Iterator[None]:
    """Set `finite_in_fp32` of a Nonfinite in the block by a repetition in fp32, except with several ranks."""
    try:
        yield
    except Nonfinite as error:
        if mixed_precision.has_fp32_repeat and world_size() == 1:
            try:
                error.finite_in_fp32 = repeat()
            except Exception as fault:  # the trial has ended in any case
                raise_if_lost(mixed_precision.device, fault)
                _logger.warning("The failed step could not be repeated in fp32: %r", fault)
        raise


def _steps_finite(
    learner: Learner, batch: Batch | None, args: TrainingArgs, state: TrainState
) -> bool | None:
    """Repeat the last step in fp32. None: another step failed, or the weights have changed since."""
    if batch is None or not bool(learner.mixed_precision.last_skipped):
        return None
    state, model = replace(state), learner.model  # a copy: the repetition may need smaller micro-batches
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
    """Run the global batch forward and backward in micro-batches; return its loss, detached.

    If memory runs out, release the `graphs` or halve the micro-batch, and repeat the batch. Each of several
    ranks has the gradients of its rows and the loss of all, and halves nothing. Raises OutOfMemory.
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
    """Run this rank's rows in micro-batches by `run` (`forward_backward` or like it); return their loss."""
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
    """Return the CUDA graphs of a trial; None if its passes cannot or must not be recorded."""
    device, config = learner.mixed_precision.device, learner.mixed_precision.config
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    # The fp32 fallback waits for each loss. Several ranks communicate between their passes.
    if not (args.cuda_graphs and is_nvidia) or config.fallback_to_fp32 or world_size() > 1:
        return None
    return StepGraphs(learner.model, partial(forward_backward, learner), device)


def forward_backward(
    learner: Learner, batch: Batch, num_items: Mapping[str, int | Tensor], share: float | Tensor
) -> Tensor:
    """Run a micro-batch forward and backward under the trial's precision; return its loss, detached.

    The other arguments are explained in `MultitaskLoss`.
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

    If the loss is not finite and the config has a fallback, `repeat_in_fp32` runs both passes instead.
    """
    buffers = mixed_precision.buffers if mixed_precision.config.fallback_to_fp32 else None
    before = buffers.copy() if buffers else []
    with mixed_precision.autocast():
        loss = loss_of()
    if not mixed_precision.falls_back(loss):
        mixed_precision.scaler.scale(loss).backward()
        return loss.detach()
    if buffers:
        buffers.restore(before)
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
    # The fp32 weights are only in the forward pass, so the backward pass must not recompute activations.
    kept = without_gradient_checkpointing(model)
    with kept, sdpa_in_place_of_flash(model.encoder), mixed_precision.float32(model) as model_in_float32:
        loss = loss_fn(model_in_float32(*batch.inputs), batch, num_items, share)
        scale(loss).backward()
    return loss.detach()


def apply_gradients(
    parameters: Iterable[Tensor],
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    loss: Tensor,
    mixed_precision: MixedPrecision,
    max_grad_norm: float,
    closure: Callable[[], Tensor] | None = None,
) -> None:
    """Unscale, clip to the global norm, step and update the scale, in this order (PyTorch, AMP examples).

    `parameters` are those of the optimizer: no others are unscaled. Of several optimisers, all step or none:
    clipping to one norm spreads NaN from each to all. `closure` is that of `Optimizer.step`.
    """
    scaler, device_type = mixed_precision.scaler, mixed_precision.device.type
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for each in optimizers:
        scaler.unscale_(each)
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm([cast(Tensor, parameter.grad) for parameter in parameters], device_type)
    # A GPU always clips. A comparison of the norm would wait for it.
    clips = bool(max_grad_norm) and (device_type != "cpu" or not norm <= max_grad_norm)
    divides = clips and all(map(is_fused, optimizers)) and not scaler.is_enabled()
    for each in filter(is_fused, optimizers):
        # PyTorch's fused optimisers divide the gradients by this.
        cast(Any, each).grad_scale = ((norm + 1e-6) / max_grad_norm).clamp(min=1) if divides else None
    if clips and not divides:
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    found_inf = mixed_precision.record_step(loss, norm)
    with mixed_precision.counting_moves(parameters):
        if not scaler.is_enabled():
            for each in optimizers:
                step_unless(each, found_inf, closure)
            return
        if len(optimizers) == 1 or not found_inf:
            for each in optimizers:
                scaler.step(each)
        mixed_precision.update_scale()
