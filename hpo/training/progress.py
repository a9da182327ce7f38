"""How far a trial is, and how fast: its budget, what is counted as training, and the state that a checkpoint
holds.

Throughput is measured between marks that are set after each optimiser step: wall time on a CPU, events
on a GPU, which cost no synchronisation. The first steps are left out (allocator, autotuning, caches), and
so is what lies before a `start` call: evaluation, the copy for a checkpoint, compilation. Tokens are real
tokens, without padding.

Energy is measured between `start` and `stop`, over those of these steps that `hpo.training.energy` can cover.

The meter's size does not grow with the steps: it holds sums, and the seconds of the last `RECENT_STEPS`, of
which the percentiles are.
"""

from __future__ import annotations

import operator
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpo.data.batches import Batch
from hpo.device import DeviceInfo, EnergyCounter, synchronize
from hpo.training.energy import EnergyMeter

FIRST_STEP_SHARE = 0.005
"""Share of a budget of seconds that half of the first step is taken for."""

WARMUP_STEPS = 3
"""Steps not counted as throughput, unless a trial has no more than these."""

RECENT_STEPS = 1000
"""Steps whose seconds are kept; of a GPU also those whose events are kept before it is waited for."""


@dataclass(frozen=True)
class Budget:
    """How long a trial trains: exactly one of these is given."""

    max_steps: int | None = None
    max_seconds: float | None = None
    """Seconds of training; evaluation and compilation are not counted."""

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

    def evaluations_due(self, state: TrainState, evaluate_at: Sequence[Fraction]) -> int:
        """How many of the evaluations at these shares of the budget should have been made by now.

        In steps the one at a share is due after exactly ceil(share * steps).
        """
        used: float | Fraction = self.used(state)
        if self.max_steps is not None:
            used = Fraction(state.step, self.max_steps)
        return bisect_right(evaluate_at, used)


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
    evaluation_scoring_seconds: float = 0.0
    """The part of `evaluation_seconds` that decodes and scores."""
    callback_seconds: float = 0.0
    """In callbacks of the study's own code."""
    num_evaluations: int = 0
    micro_batch_size: int = 0
    oom_halvings: int = 0
    num_graphs: int = 0
    """Shapes whose passes this process has recorded as CUDA graphs."""
    graph_problem: str = ""
    """Why it records none any more; empty: nothing is wrong."""

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

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint. Waits for the device."""
        return vars(self) | {"loss_sum": float(self.loss_sum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class StepTotals(NamedTuple):
    """Sums over steps; `slots` are the places of a batch, padding included."""

    steps: int = 0
    seconds: float = 0.0
    examples: float = 0.0
    windows: int = 0
    tokens: int = 0
    slots: int = 0

    def plus(self, other: StepTotals) -> StepTotals:
        return StepTotals(*map(operator.add, self, other))


class ThroughputMeter:
    """Examples and tokens per second of the training steps, without a device sync per step.

    Where the device has a `counter` of energy, its joules per example too.
    """

    def __init__(
        self,
        device: DeviceInfo,
        warmup_steps: int = WARMUP_STEPS,
        counter: EnergyCounter | None = None,
    ) -> None:
        self._energy = EnergyMeter(device, counter)
        self._device = device
        self._warmup_steps = warmup_steps
        self._previous: Any = None
        self._pending: list[tuple[Any, Any, StepTotals]] = []
        self._warmup, self._after = StepTotals(), StepTotals()
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        """Of the steps after the warm-up, or of the warm-up while there are no others."""

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin an uninterrupted stretch of steps."""
        if self._num_steps >= self._warmup_steps:
            self._energy.start()
        self._previous = self._mark()

    def stop(self) -> None:
        """End the stretch before something else, such as an evaluation or the copy for a checkpoint."""
        self._energy.stop()

    @property
    def _num_steps(self) -> int:
        return self._warmup.steps + self._after.steps + len(self._pending)

    def step(self, num_examples: float, num_windows: int, num_tokens: int, num_slots: int) -> None:
        """Count one optimiser step; a window counts as the part that it is of its example."""
        mark = self._mark()
        counts = StepTotals(1, 0.0, num_examples, num_windows, num_tokens, num_slots)
        self._pending.append((self._previous, mark, counts))
        self._previous = mark
        self._energy.count(num_examples)
        if self._num_steps == self._warmup_steps:
            self._energy.start()
        if len(self._pending) > RECENT_STEPS:
            self._settle()

    def _settle(self) -> None:
        on_gpu = self._device.type == "cuda"
        if self._pending and on_gpu:
            synchronize(self._device)
        for start, end, counts in self._pending:
            seconds = start.elapsed_time(end) / 1000 if on_gpu else end - start
            step = counts._replace(seconds=seconds)
            if self._warmup.steps < self._warmup_steps:
                self._warmup = self._warmup.plus(step)
            else:
                if not self._after.steps:
                    self._seconds.clear()
                self._after = self._after.plus(step)
            self._seconds.append(seconds)
        self._pending.clear()

    def totals(self) -> StepTotals:
        """Of all training steps so far, the warm-up included; synchronises once."""
        self._settle()
        return self._warmup.plus(self._after)

    def summary(self) -> dict[str, float | None]:
        """Rates and step times in seconds so far; synchronises once."""
        total = self.totals()
        rated = self._after if self._after.steps else self._warmup
        p50, p95 = None, None
        if self._seconds:
            p50, p95 = np.percentile(self._seconds, (50, 95), method="inverted_cdf").tolist()
        return {
            "train_examples_per_second": _ratio(rated.examples, rated.seconds),
            "train_tokens_per_second": _ratio(rated.tokens, rated.seconds) or None,
            "step_seconds_p50": p50,
            "step_seconds_p95": p95,
            "padding_share": _ratio(total.slots - total.tokens, total.slots),
            "train_joules_per_example": self._energy.joules_per_example(),
        }

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: plain numbers."""
        self._settle()
        totals = {"warmup": self._warmup._asdict(), "after": self._after._asdict()}
        return {**totals, "seconds": list(self._seconds), "energy": self._energy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._warmup, self._after = StepTotals(**state["warmup"]), StepTotals(**state["after"])
        self._seconds = deque(state["seconds"], maxlen=RECENT_STEPS)
        self._energy.load_state_dict(state["energy"])


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class CompileClock:
    """Seconds that the compiler has worked in this process since `start`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_interruptions = 0
        self._began = 0.0

    def start(self) -> None:
        """Begin to count, until the next `torch._dynamo.reset()`."""
        from torch._dynamo.callback import on_compile_end, on_compile_start

        # Called for the outermost of nested compilations alone.
        on_compile_start(self._begin)
        on_compile_end(self._end)

    def _begin(self, _: object) -> None:
        self._began = time.perf_counter()

    def _end(self, _: object) -> None:
        self.num_interruptions += 1
        self.seconds += time.perf_counter() - self._began


class TrainingClock:
    """Counts what is training: not evaluations, copies for checkpoints, or compilation.

    A step in which something was compiled, or a CUDA graph recorded, is left out of the meter's rates.
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

    def step(self, num_examples: float, batch: Batch, *, interrupted: bool = False) -> None:
        """Give a step that has been made to the meter. `interrupted`: a CUDA graph was recorded in it."""
        if interrupted or self._compile_clock.num_interruptions != self._interruptions:
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
        self._lap, self._interruptions = self.now(), self._compile_clock.num_interruptions
