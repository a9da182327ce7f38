"""Clocks of training and compilation, throughput and energy of training steps.

The meter sets a mark after each optimiser step: wall time on a CPU, an event on a GPU, without waiting for
it. Rates leave out the first steps (allocator, autotuning, caches) and the time before a `start`: evaluation,
the copy for a checkpoint, compilation. Tokens are real tokens, without padding.

Energy comes from the counter of a GPU at the ends of a stretch of steps. The counter covers the whole board:
its idle power, its memory, and other programs. It is updated every 20 to 100 ms. So only stretches of
`MIN_STRETCH_SECONDS` count: each end is wrong by at most 5 % of their time. A stretch ended by a compilation
or the end of the process is left out with its examples.
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from hpo.data.batches import Batch
from hpo.device import DeviceInfo, EnergyCounter, synchronize
from hpo.training.budget import TrainState
from hpo.training.distributed import decide

WARMUP_STEPS = 3  # steps without a rate, unless a trial has no others

RECENT_STEPS = 1000  # most durations in memory; on a GPU also most pending events

MIN_STRETCH_SECONDS = 2.0
"""The shortest counted stretch of energy: twenty times the longest update period of the counter."""


class StepTotals(NamedTuple):
    """Sums over steps. `slots` are the positions of a batch, including padding."""

    steps: int = 0
    seconds: float = 0.0
    examples: float = 0.0
    windows: int = 0
    tokens: int = 0
    slots: int = 0

    def plus(self, other: StepTotals) -> StepTotals:
        return StepTotals(*map(operator.add, self, other))


class EnergyMeter:
    """Joules of training and their examples. Empty without a counter."""

    def __init__(self, device: DeviceInfo, counter: EnergyCounter | None) -> None:
        self._device = device
        self._counter = counter
        self._began: tuple[float, float] | None = None  # seconds and joules at the beginning of the stretch
        self._stretch_examples = 0.0
        self._joules, self._examples = 0.0, 0.0

    def start(self) -> None:
        """Begin a stretch of steps. Waits for the device if it has a counter."""
        self._began, self._stretch_examples = self._read(), 0.0

    def count(self, num_examples: float) -> None:
        self._stretch_examples += num_examples

    def stop(self) -> None:
        """End the stretch. Waits for the device if it has a counter."""
        began, self._began = self._began, None
        ended = self._read() if began else None
        if began and ended and ended[0] - began[0] >= MIN_STRETCH_SECONDS:
            self._joules += ended[1] - began[1]
            self._examples += self._stretch_examples

    def joules_per_example(self) -> float | None:
        """Return joules per example over all stretches. None: not measured."""
        return self._joules / self._examples if self._examples > 0 else None

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint, without the current stretch."""
        return {"joules": self._joules, "examples": self._examples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._joules, self._examples = state["joules"], state["examples"]

    def _read(self) -> tuple[float, float] | None:
        if self._counter is None or self._counter.missing:
            return None
        synchronize(self._device)
        joules = self._counter.read_joules()
        return None if joules is None else (time.perf_counter(), joules)


class ThroughputMeter:
    """Examples and tokens per second of training steps; joules per example if there is a `counter`."""

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
        """Durations of steps after the warm-up, or of the warm-up if there are no others."""

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
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
        """Count one optimiser step. A window counts as its part of an example."""
        mark = self._mark()
        counts = StepTotals(1, 0.0, num_examples, num_windows, num_tokens, num_slots)
        self._pending.append((self._previous, mark, counts))
        self._previous = mark
        self._energy.count(num_examples)
        if self._num_steps == self._warmup_steps:
            self._energy.start()
        if len(self._pending) > RECENT_STEPS:
            self._read_pending()

    def _read_pending(self) -> None:
        """Read the durations of pending steps. Waits for the device."""
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
        """Return the sums over all steps, including the warm-up. Waits for the device."""
        self._read_pending()
        return self._warmup.plus(self._after)

    def summary(self) -> dict[str, float | None]:
        """Return rates and step times in seconds. Waits for the device."""
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
        self._read_pending()
        totals = {"warmup": self._warmup._asdict(), "after": self._after._asdict()}
        return {**totals, "seconds": list(self._seconds), "energy": self._energy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._warmup, self._after = StepTotals(**state["warmup"]), StepTotals(**state["after"])
        self._seconds = deque(state["seconds"], maxlen=RECENT_STEPS)
        self._energy.load_state_dict(state["energy"])


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole and not math.isnan(part) else None


class CompileClock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_interruptions = 0
        self._began = 0.0

    def start(self) -> None:
        """Begin to count, until the next `torch._dynamo.reset()`."""
        # Called only for the outermost of nested compilations.
        torch._dynamo.callback.on_compile_start(self._begin)
        torch._dynamo.callback.on_compile_end(self._end)

    def _begin(self, _: object) -> None:
        self._began = time.perf_counter()

    def _end(self, _: object) -> None:
        self.num_interruptions += 1
        self.seconds += time.perf_counter() - self._began


class TrainingClock:
    """Seconds of training, without evaluation, copies for checkpoints and compilation."""

    def __init__(
        self, state: TrainState, meter: ThroughputMeter, compile_clock: CompileClock | None = None
    ) -> None:
        self.state = state
        self.meter = meter
        self._compile_clock = compile_clock or CompileClock()
        self._begin_lap()

    def now(self) -> float:
        """Return the seconds of a clock that stops during compilation."""
        return time.perf_counter() - self._compile_clock.seconds

    def start(self) -> None:
        self.meter.start()
        self._begin_lap()

    def step(self, num_examples: float, batch: Batch, *, interrupted: bool = False) -> None:
        """Count a step in the meter, unless it was `interrupted` by the recording of a CUDA graph."""
        if interrupted or self._compile_clock.num_interruptions != self._interruptions:
            self.meter.start()
        else:
            self.meter.step(num_examples, len(batch.windows_B), batch.num_tokens, batch.input_ids_BL.numel())

    def lap(self) -> float:
        """Return rank 0's seconds since the last call or `start`; add them to `state.train_seconds`."""
        before = self._lap
        self._begin_lap()
        seconds = decide(lambda: self._lap - before)
        self.state.train_seconds += seconds
        return seconds

    def _begin_lap(self) -> None:
        self._lap, self._interruptions = self.now(), self._compile_clock.num_interruptions
