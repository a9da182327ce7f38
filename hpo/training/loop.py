"""The training loop: steps and evaluations of one trial, as a generator; it knows no Optuna.

What the loop promises:

- A global batch is one optimiser step however it is cut into micro-batches. Each task's loss is its sum
  over labelled items divided by their number in the *global* batch, so micro-batching changes nothing,
  also where tasks miss labels.
- Every step draws its dropout masks from a generator seeded by (seed, step), and every epoch its batches
  by (seed, epoch). A trial that goes on from a checkpoint, or repeats a step that ran out of memory,
  therefore draws what it would have drawn.
- The learning rate follows the share of the budget that is used up, so a budget of seconds works as one
  of steps does.
- With the fused optimisers no step waits for the device, except every `CHECK_EVERY` of them (and the fp32
  fallback, which must know whether a loss is finite).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hpo.data.batches import Batch, collate, training_batches
from hpo.data.tokenized_split import TokenizedSplit
from hpo.device import synchronize
from hpo.errors import Nonfinite, OutOfMemory
from hpo.memory import is_out_of_memory
from hpo.precision.amp import MixedPrecision
from hpo.training.compilation import CompileClock
from hpo.training.evaluate import Evaluation, evaluate
from hpo.training.losses import MultitaskLoss
from hpo.training.optim import schedule_factor, set_learning_rate
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

    def used(self, progress: TrainState, steps_per_epoch: int) -> float:
        """The share that is used up, from 0 to 1 (and over, in seconds)."""
        if self.max_seconds is not None:
            return progress.train_seconds / self.max_seconds
        return progress.step / self.num_steps(steps_per_epoch)

    def learning_rate_position(self, progress: TrainState, steps_per_epoch: int) -> float:
        """Where on the schedule the next step lies: its middle, so neither end has a rate of zero.

        Under `max_seconds` the step is taken to last as long as the one before, the first one
        `FIRST_STEP_SHARE` of the budget.
        """
        if self.max_seconds is not None:
            half = progress.step_seconds / 2 or FIRST_STEP_SHARE * self.max_seconds
            return min(1.0, (progress.train_seconds + half) / self.max_seconds)
        return (progress.step + 0.5) / self.num_steps(steps_per_epoch)

    def num_steps(self, steps_per_epoch: int) -> int:
        if self.max_steps is not None:
            return self.max_steps
        assert self.epochs is not None
        return max(1, round(self.epochs * steps_per_epoch))


@dataclass(frozen=True)
class TrainingArgs:
    """What the loop needs to know besides the model, the data and the numeric state."""

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
    decision_metrics: Mapping[str, str] = field(default_factory=dict)
    """{task: metric} that thresholds and the like maximise; a task left out: its primary metric."""


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
    train_seconds: float = 0.0
    step_seconds: float = 0.0
    """Of the last step."""
    evaluation_seconds: float = 0.0
    num_evaluations: int = 0
    micro_batch_size: int = 0
    oom_halvings: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: MultitaskLoss,
    mixed_precision: MixedPrecision,
    train_split: TokenizedSplit,
    validation_split: TokenizedSplit,
    plan: TrainingArgs,
    progress: TrainState,
    meter: ThroughputMeter,
    pad_id: int,
    on_step: Callable[[], bool] = lambda: False,
    compile_clock: CompileClock | None = None,
) -> Iterator[Evaluation]:
    """Train until the budget is used up, yielding an evaluation of the validation split at a time.

    `model` is on the device, in the precision's weights. `progress` says where to begin and is kept up to
    date. `on_step` runs after each step; True says that it took its time (the copy for a checkpoint), which
    then counts as no training. What it raises ends the training. Seconds of `compile_clock` are no training
    either: they use up no budget, and a step that has any is left out of the rates.

    Raises Nonfinite when loss, gradients or metrics stay NaN or infinite, OutOfMemory when a single
    example does not fit.
    """
    device = mixed_precision.device
    lengths_W, share_W = train_split.lengths_W, train_split.example_share_W
    steps_per_epoch = len(training_batches(lengths_W, plan.batch_size, plan.seed, epoch=0))
    progress.micro_batch_size = progress.micro_batch_size or min(plan.micro_batch_size, plan.batch_size)
    losses: list[Tensor] = []
    compile_clock = compile_clock or CompileClock()
    model.train()
    meter.start()
    marked = time.perf_counter()
    while plan.budget.used(progress, steps_per_epoch) < 1:
        batches = training_batches(lengths_W, plan.batch_size, plan.seed, progress.epoch)
        if progress.batch == 0:
            mixed_precision.start_epoch()
        for windows in batches[progress.batch :]:
            position = plan.budget.learning_rate_position(progress, steps_per_epoch)
            set_learning_rate(optimizer, schedule_factor(plan.schedule, position, plan.warmup_ratio))
            compiled = compile_clock.seconds
            batch = collate(train_split, windows, objective.tasks, pad_id)
            loss = accumulate_gradients(model, objective, batch, mixed_precision, plan.seed, progress)
            apply_gradients(model, optimizer, loss, mixed_precision, plan.max_grad_norm)
            losses.append(loss)
            progress.step += 1
            progress.batch += 1
            num_examples = float(share_W[windows].sum())
            progress.num_examples += num_examples
            progress.num_tokens += batch.num_tokens
            compiled = compile_clock.seconds - compiled
            if compiled:
                meter.start()
            else:
                meter.step(num_examples, len(windows), batch.num_tokens, batch.input_ids_BL.numel())
            if progress.step % CHECK_EVERY[device.type] == 0:
                _check(mixed_precision, objective)
            progress.step_seconds = time.perf_counter() - marked - compiled
            progress.train_seconds += progress.step_seconds
            marked = time.perf_counter()
            used = plan.budget.used(progress, steps_per_epoch)
            if progress.batch == len(batches):
                progress.epoch, progress.batch = progress.epoch + 1, 0
            if used * plan.num_evaluations >= progress.num_evaluations + 1 or used >= 1:
                _check(mixed_precision, objective)
                synchronize(device)
                progress.train_seconds += time.perf_counter() - marked
                # A slow step may pass two marks: the index stays that of the share of the budget.
                reached = int(min(used, 1.0) * plan.num_evaluations)
                progress.num_evaluations = max(progress.num_evaluations + 1, reached)
                started, compiled = time.perf_counter(), compile_clock.seconds
                metrics, decisions = evaluate(
                    model,
                    validation_split,
                    objective.tasks,
                    mixed_precision,
                    plan.evaluation_tokens,
                    pad_id,
                    decision_metrics=plan.decision_metrics,
                )
                seconds = time.perf_counter() - started - (compile_clock.seconds - compiled)
                progress.evaluation_seconds += seconds
                yield Evaluation(
                    step=progress.step,
                    epoch=progress.step / steps_per_epoch,
                    budget_used=min(1.0, used),
                    seconds=progress.train_seconds,
                    metrics=metrics,
                    decisions=decisions,
                    examples_per_second=len(validation_split.examples) / seconds,
                    train_loss=float(torch.stack(losses).mean()) if losses else None,
                    index=progress.num_evaluations,
                    rates=meter.summary(),
                )
                losses.clear()
                model.train()
            if on_step() or not losses:
                meter.start()
                marked = time.perf_counter()
            if used >= 1:
                return


def accumulate_gradients(
    model: nn.Module,
    objective: MultitaskLoss,
    batch: Batch,
    mixed_precision: MixedPrecision,
    seed: int,
    progress: TrainState,
) -> Tensor:
    """Forward and backward over the global batch in micro-batches; return its loss, detached.

    Where the device's memory does not suffice, the micro-batch is halved and the batch done again.
    Raises OutOfMemory when one example does not fit.
    """
    while True:
        try:
            return _accumulate(model, objective, batch, mixed_precision, seed, progress)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if progress.micro_batch_size == 1:
                raise OutOfMemory(
                    f"one example of {batch.input_ids_BL.shape[1]} tokens does not fit into memory."
                ) from error
        # Here, after the error and the activations that it holds are gone.
        progress.micro_batch_size = -(-min(progress.micro_batch_size, len(batch.windows_B)) // 2)
        progress.oom_halvings += 1
        if mixed_precision.device.type == "cuda":
            torch.cuda.empty_cache()


def _accumulate(
    model: nn.Module,
    objective: MultitaskLoss,
    batch: Batch,
    mixed_precision: MixedPrecision,
    seed: int,
    progress: TrainState,
) -> Tensor:
    device = mixed_precision.device.torch_device
    global_items = objective.count(batch)
    torch.manual_seed(step_seed(seed, progress.step))
    model.zero_grad(set_to_none=True)
    objective.start_step()
    total = torch.zeros((), device=device)
    for part in batch.split(progress.micro_batch_size):
        compute = objective.of(part.to(device), objective.count(part), global_items)
        loss = mixed_precision.loss(model, compute)
        mixed_precision.scaler.scale(loss).backward()
        total += loss.detach()
    objective.finish_step(progress.step)
    return total


def apply_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    mixed_precision: MixedPrecision,
    max_grad_norm: float,
) -> None:
    """Unscale, clip to the global norm, step, update the scale: in this order (PyTorch, AMP examples)."""
    scaler = mixed_precision.scaler
    scaler.unscale_(optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
    norm = gradient_norm(gradients, mixed_precision.device.type)
    # Whether there is anything to clip, a GPU would have to be waited for to know.
    clips = bool(max_grad_norm) and (mixed_precision.device.type != "cpu" or not norm <= max_grad_norm)
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not scaler.is_enabled():
        # PyTorch's fused optimisers divide by this as they read the gradients.
        cast(Any, optimizer).grad_scale = ((norm + 1e-6) / max_grad_norm).clamp(min=1) if clips else None
    elif clips:
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    mixed_precision.record_step(loss, norm)
    scaler.step(optimizer)
    scaler.update()


def gradient_norm(gradients: Sequence[Tensor], device_type: str) -> Tensor:
    """The 2-norm of all gradients together; on a CPU in fp32, whatever they are in."""
    if device_type != "cpu":
        return nn.utils.get_total_norm(gradients)
    # Faster than get_total_norm, whose kernel does not use the processor's vectors where it converts.
    flat = (gradient.reshape(-1).float() for gradient in gradients)
    return torch.stack([torch.dot(values, values) for values in flat]).sum().sqrt()


def step_seed(seed: int, step: int) -> int:
    """A seed of its own for each step, by numpy's SeedSequence so that near seeds share nothing."""
    return int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0])


def _check(mixed_precision: MixedPrecision, objective: MultitaskLoss) -> None:
    try:
        mixed_precision.check()
    except Nonfinite as end:
        tasks = objective.nonfinite_tasks()
        raise Nonfinite(f"{end}{' First in: ' + ', '.join(tasks) + '.' if tasks else ''}") from end
