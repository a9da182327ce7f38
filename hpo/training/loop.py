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

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpo.data.batches import Batch, collate, num_batches, training_batches
from hpo.data.tokenized_split import TokenizedSplit
from hpo.device import synchronize
from hpo.errors import Nonfinite, OutOfMemory
from hpo.memory import is_out_of_memory
from hpo.precision.amp import MixedPrecision
from hpo.random_numbers import manual_seed
from hpo.training.compilation import CompileClock
from hpo.training.distributed import ONE_RANK, Ranks
from hpo.training.evaluate import Evaluation, predict_logits, score_logits
from hpo.training.losses import MultitaskLoss
from hpo.training.numerics import StepProbe
from hpo.training.optim import gradient_norm, schedule_factor, set_learning_rate
from hpo.training.step_seed import step_seed
from hpo.training.throughput import ThroughputMeter

CHECK_EVERY = {"cpu": 1, "cuda": 20}
"""Steps between two looks at whether losses and gradients are finite; on a GPU a look waits for it."""

FIRST_STEP_SHARE = 0.005
"""Share of a budget of seconds that half of the first step is taken for."""


@dataclass(frozen=True)
class Budget:
    """How long a trial trains: exactly one of these is given."""

    epochs: float | None = None
    max_steps: int | None = None
    max_seconds: float | None = None
    """Seconds of training; evaluation and compilation are not counted."""

    def in_steps(self, steps_per_epoch: int) -> Budget:
        """The same budget with its epochs as steps, as the methods below need it."""
        if self.epochs is None:
            return self
        return Budget(max_steps=max(1, round(self.epochs * steps_per_epoch)))

    def used(self, state: TrainState) -> float:
        """The share that is used up, from 0 to 1 (and over, in seconds)."""
        return self._share(state.step, state.train_seconds)

    def learning_rate_position(self, state: TrainState) -> float:
        """Where on the schedule the next step lies: its middle, so neither end has a rate of zero.

        Under `max_seconds` the step is taken to last as long as the one before, the first one
        `FIRST_STEP_SHARE` of the budget.
        """
        half = state.step_seconds / 2 or FIRST_STEP_SHARE * (self.max_seconds or 0)
        return min(1.0, self._share(state.step + 0.5, state.train_seconds + half))

    def _share(self, steps: float, seconds: float) -> float:
        if self.max_seconds is not None:
            return seconds / self.max_seconds
        assert self.max_steps is not None
        return steps / self.max_steps

    def evaluations_due(self, state: TrainState, num_evaluations: int) -> int:
        """How many of `num_evaluations`, evenly spaced over the budget, should have been made by now.

        In steps the n-th of N is due after exactly ceil(n * steps / N); the last only at the end.
        """
        if self.max_steps is not None:
            return min(num_evaluations, state.step * num_evaluations // self.max_steps)
        used = self.used(state)
        return num_evaluations if used >= 1 else min(num_evaluations - 1, int(used * num_evaluations))

    def evaluation_follows(self, state: TrainState, num_evaluations: int) -> bool:
        """Whether one is due after the next step, in seconds if it takes up to twice as long as the last."""
        seconds = state.train_seconds + 2 * state.step_seconds
        then = replace(state, step=state.step + 1, train_seconds=seconds)
        return self.evaluations_due(then, num_evaluations) > state.num_evaluations


@dataclass(frozen=True)
class TrainingData:
    """The tokens of a trial."""

    train: TokenizedSplit
    validation: TokenizedSplit
    pad_id: int


@dataclass(frozen=True)
class TrainingArgs:
    """The settings of the loop."""

    budget: Budget
    batch_size: int
    micro_batch_size: int
    seed: int
    schedule: str
    warmup_ratio: float
    max_grad_norm: float
    num_evaluations: int
    """Evaluations over the whole budget, evenly spaced; the last is at its end."""
    evaluation_tokens: int
    """Padded tokens in one evaluation batch."""
    decision_metrics: Mapping[str, str]
    """{task: metric} that thresholds and the like maximise; a task left out: its primary metric."""
    ranks: Ranks = ONE_RANK
    """The processes that train together; each calls `train` with the same arguments."""


@dataclass
class TrainState:
    """How far a trial is; checkpointed."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    num_examples: float = 0.0
    """A window counts as the part that it is of its example."""
    num_tokens: int = 0
    loss_sum: float | Tensor = 0.0
    """Over the `num_losses` steps since the last evaluation; in fp64, on the device."""
    num_losses: int = 0
    train_seconds: float = 0.0
    step_seconds: float = 0.0
    """Of the last step."""
    evaluation_seconds: float = 0.0
    num_evaluations: int = 0
    micro_batch_size: int = 0
    oom_halvings: int = 0
    numerics: dict[str, Any] | None = None
    """What `StepProbe` saw since the last evaluation; rank 0's."""
    skipped_steps: int | None = 0
    """Until the numbers of an evaluation were last taken."""

    def count_step(self, loss: Tensor, num_examples: float, num_tokens: int) -> None:
        """Count a step that was made."""
        self.step += 1
        self.batch += 1
        self.num_examples += num_examples
        self.num_tokens += num_tokens
        self.loss_sum = self.loss_sum + loss.double()
        self.num_losses += 1

    def take_mean_loss(self) -> float:
        """The mean loss of the steps since the last call. Waits for the device."""
        mean = float(self.loss_sum) / self.num_losses
        self.loss_sum, self.num_losses = 0.0, 0
        return mean

    def take_numerics(self, skipped_steps: int | None) -> dict[str, Any] | None:
        """What was measured since the last call, with the steps skipped since; of `skipped_steps` in all."""
        if (found := self.numerics) is None:
            return None
        before, self.skipped_steps, self.numerics = self.skipped_steps, skipped_steps, None
        return {**found, "skipped_steps": None if skipped_steps is None else skipped_steps - (before or 0)}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint. Waits for the device."""
        return vars(self) | {"loss_sum": float(self.loss_sum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class TrainingClock:
    """Counts what is training: not evaluations, copies for checkpoints, or compilation.

    A step in which something was compiled is left out of the meter's rates.
    """

    def __init__(
        self, state: TrainState, meter: ThroughputMeter, compile_clock: CompileClock | None = None
    ) -> None:
        self.state = state
        self.meter = meter
        self._compile_clock = compile_clock or CompileClock()
        self._begin_lap()

    def now(self) -> float:
        """Seconds on a clock that stands still while something is compiled."""
        return time.perf_counter() - self._compile_clock.seconds

    def start(self) -> None:
        """Begin a stretch of training after something else."""
        self.meter.start()
        self._begin_lap()

    def step(self, num_examples: float, batch: Batch) -> None:
        """Give a step that has been made to the meter."""
        if self._compile_clock.seconds != self._compiled:
            self.meter.start()
        else:
            self.meter.step(num_examples, len(batch.windows_B), batch.num_tokens, batch.input_ids_BL.numel())

    def lap(self) -> float:
        """Seconds of training since the last call or `start`, added to `state.train_seconds`."""
        before = self._lap
        self._begin_lap()
        self.state.train_seconds += self._lap - before
        return self._lap - before

    def _begin_lap(self) -> None:
        self._lap, self._compiled = self.now(), self._compile_clock.seconds


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: MultitaskLoss,
    mixed_precision: MixedPrecision,
    data: TrainingData,
    args: TrainingArgs,
    clock: TrainingClock,
    on_step: Callable[[], bool] = lambda: False,
    on_micro_batch: Callable[[], None] = lambda: None,
) -> Iterator[Evaluation]:
    """Train until the budget is used up, yielding an evaluation of the validation split at a time.

    `model` is on the device, in the precision's weights. `clock.state` says where to begin and is kept up to
    date. `on_step` runs after each step but the last; True says that it took its time (the copy for a
    checkpoint), which then counts as no training. `on_micro_batch` runs between the micro-batches of a step
    and before the batches of an evaluation. What these raise ends the training, with model, optimiser and
    state as the last whole step left them; an evaluation that was left is made when the training goes on.

    Raises Nonfinite when loss, gradients or metrics stay NaN or infinite, OutOfMemory when a single
    example does not fit.
    """
    device, state, lengths_W = mixed_precision.device, clock.state, data.train.lengths_W
    ranks = args.ranks
    budget = args.budget.in_steps(num_batches(len(lengths_W), args.batch_size))
    micro_batch_size = min(args.micro_batch_size, ranks.share(args.batch_size))
    state.micro_batch_size = state.micro_batch_size or micro_batch_size
    probe = StepProbe(model, optimizer, mixed_precision)

    def is_due() -> bool:
        return budget.evaluations_due(state, args.num_evaluations) > state.num_evaluations

    def evaluation() -> Evaluation:
        _check(mixed_precision, loss_fn)
        synchronize(device)
        _lap(clock, ranks)
        index = budget.evaluations_due(state, args.num_evaluations)
        return _evaluate(model, loss_fn, mixed_precision, data, args, clock, index, on_micro_batch)

    clock.start()
    if is_due():
        yield evaluation()
        clock.start()
    model.train()
    while budget.used(state) < 1:
        batches = training_batches(lengths_W, args.batch_size, args.seed, state.epoch)
        if state.batch == 0:
            mixed_precision.start_epoch()
        for windows in batches[state.batch :]:
            with ranks.watched():
                position = budget.learning_rate_position(state)
                set_learning_rate(optimizer, schedule_factor(args.schedule, position, args.warmup_ratio))
                batch = collate(data.train, windows, loss_fn.tasks, data.pad_id)
                loss = accumulate_gradients(
                    model, loss_fn, batch, mixed_precision, args.seed, state, on_micro_batch, ranks
                )
                measures = ranks.is_main and budget.evaluation_follows(state, args.num_evaluations)
                if measures:
                    probe.start()
                apply_gradients(model, optimizer, loss, mixed_precision, args.max_grad_norm)
                if measures:
                    state.numerics = probe.result(state.step + 1)
                num_examples = float(data.train.example_share_W[windows].sum())
                state.count_step(loss, num_examples, batch.num_tokens)
                clock.step(num_examples, batch)
                if state.step % CHECK_EVERY[device.type] == 0:
                    _check(mixed_precision, loss_fn)
                state.step_seconds = _lap(clock, ranks)
            if state.batch == len(batches):
                state.epoch, state.batch = state.epoch + 1, 0
            evaluates = is_due()
            if evaluates:
                yield evaluation()
                model.train()
            if budget.used(state) >= 1:
                return
            if on_step() or evaluates:
                clock.start()


def _lap(clock: TrainingClock, ranks: Ranks) -> float:
    """`clock.lap()` as rank 0 has it: learning rates and the end of the budget may follow from it."""
    seconds = clock.lap()
    clock.state.train_seconds, seconds = ranks.gather(clock.state.train_seconds, seconds)[0]
    return seconds


def _check(mixed_precision: MixedPrecision, loss_fn: MultitaskLoss) -> None:
    try:
        mixed_precision.check()
    except Nonfinite as end:
        tasks = loss_fn.nonfinite_tasks()
        raise Nonfinite(f"{end}{' First in: ' + ', '.join(tasks) + '.' if tasks else ''}") from end


def _evaluate(
    model: nn.Module,
    loss_fn: MultitaskLoss,
    mixed_precision: MixedPrecision,
    data: TrainingData,
    args: TrainingArgs,
    clock: TrainingClock,
    index: int,
    on_batch: Callable[[], None],
) -> Evaluation:
    state, began = clock.state, clock.now()
    split, tasks = data.validation, loss_fn.tasks
    where = model, split, tasks, mixed_precision, args.evaluation_tokens, data.pad_id
    logits = predict_logits(*where, args.ranks, on_batch)
    metrics, decisions = score_logits(logits, split, tasks, None, args.decision_metrics)
    seconds = clock.now() - began
    state.num_evaluations = index
    state.evaluation_seconds += seconds
    steps_per_epoch = num_batches(data.train.num_windows, args.batch_size)
    return Evaluation(
        step=state.step,
        epoch=state.step / steps_per_epoch,
        budget_used=min(1.0, args.budget.in_steps(steps_per_epoch).used(state)),
        seconds=state.train_seconds,
        metrics=metrics,
        decisions=decisions,
        examples_per_second=len(data.validation.examples) / seconds,
        train_loss=state.take_mean_loss(),
        index=index,
        rates=clock.meter.summary(),
        numerics=state.take_numerics(mixed_precision.statistics().skipped_steps),
    )


def accumulate_gradients(
    model: nn.Module,
    loss_fn: MultitaskLoss,
    batch: Batch,
    mixed_precision: MixedPrecision,
    seed: int,
    state: TrainState,
    on_micro_batch: Callable[[], None] = lambda: None,
    ranks: Ranks = ONE_RANK,
) -> Tensor:
    """Forward and backward over the global batch in micro-batches; return its loss, detached.

    If memory runs out, the micro-batch is halved and the batch done again. `on_micro_batch` runs between
    micro-batches. Raises OutOfMemory when one example does not fit. On all `ranks` the same.
    """
    while True:
        manual_seed(step_seed(ranks.seed(seed), state.step))
        model.zero_grad(set_to_none=True)
        mixed_precision.start_step()
        try:
            return _accumulate(model, loss_fn, batch, mixed_precision, state, on_micro_batch, ranks)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if state.micro_batch_size == 1:
                raise OutOfMemory(
                    f"one example of {batch.input_ids_BL.shape[1]} tokens does not fit into memory."
                ) from error
        # Here, after the error and the activations that it holds are gone.
        most = ranks.share(len(batch.windows_B))
        state.micro_batch_size = -(-min(state.micro_batch_size, most) // 2)
        state.oom_halvings += 1
        if mixed_precision.device.type == "cuda":
            torch.cuda.empty_cache()


def _accumulate(
    model: nn.Module,
    loss_fn: MultitaskLoss,
    batch: Batch,
    mixed_precision: MixedPrecision,
    state: TrainState,
    on_micro_batch: Callable[[], None],
    ranks: Ranks,
) -> Tensor:
    device = mixed_precision.device.torch_device
    global_items = loss_fn.count(batch)
    total = torch.zeros((), device=device)
    task_losses_T = torch.zeros(len(loss_fn.tasks), device=device)
    for number, part in enumerate(ranks.micro_batches(batch, state.micro_batch_size)):
        with ranks.together():
            if number:
                on_micro_batch()
            if not len(part.windows_B):
                continue
            items = loss_fn.count(part)
            compute = partial(loss_fn, batch=part.to(device), items=items, global_items=global_items)
            loss = mixed_precision.loss(model, compute)
            mixed_precision.scaler.scale(loss).backward()
            total += loss.detach()
            task_losses_T += loss_fn.task_losses_T
    ranks.sum_gradients(model, total, task_losses_T)
    mixed_precision.end_step(sum(int(number) for (number,) in ranks.gather(mixed_precision.step_fallbacks)))
    loss_fn.note_nonfinite(task_losses_T, state.step)
    return total


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
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not scaler.is_enabled():
        # PyTorch's fused optimisers divide by this as they read the gradients.
        cast(Any, optimizer).grad_scale = ((norm + 1e-6) / max_grad_norm).clamp(min=1) if clips else None
    elif clips:
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    mixed_precision.record_step(loss, norm)
    scaler.step(optimizer)
    scaler.update()
