"""Energy per example, from the counter of a GPU at the ends of a stretch of steps.

The counter covers the whole board: its idle power, its memory, and other programs. It is updated every 20 to
100 ms. So only stretches of `MIN_STRETCH_SECONDS` count: each end is wrong by at most 5 % of their time. A
stretch ended by a compilation or the end of the process is left out with its examples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hpo.device import DeviceInfo, EnergyCounter, synchronize

MIN_STRETCH_SECONDS = 2.0
"""The shortest counted stretch: twenty times the longest update period of the counter."""


class EnergyMeter:
    """Joules of training and their examples. Empty without a counter."""

    def __init__(self, device: DeviceInfo, counter: EnergyCounter | None) -> None:
        self._device = device
        self._counter = counter
        self._began: tuple[float, float] | None = None
        """Seconds and joules at the beginning of the stretch."""
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
        return self._joules / self._examples if self._examples else None

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
