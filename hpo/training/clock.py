"""Clocks of compilation and of training."""

from __future__ import annotations

import time

import torch

from hpo.data.batches import Batch
from hpo.training.budget import TrainState
from hpo.training.distributed import decide
from hpo.training.throughput import ThroughputMeter


class CompileClock:
    """Seconds of compilation in this process since `start`."""

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
    """Seconds of training, without evaluation, copies for checkpoints and compilation.

    The meter's rates leave out a step with a compilation or a new CUDA graph.
    """

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
        """Begin or continue training."""
        self.meter.start()
        self._begin_lap()

    def step(self, num_examples: float, batch: Batch, *, interrupted: bool = False) -> None:
        """Count a step in the meter. `interrupted`: the step recorded a CUDA graph."""
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
