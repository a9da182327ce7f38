"""The latency of `TrainedModel.predict` for several artifacts: texts in, predictions out.

Other programs slow down whatever runs at that moment, so the artifacts take turns on the same texts. The
first call of a turn does not count. The speed-up is the ratio of the medians of all rounds, with its range
over the rounds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpo.tasks.example import Example

BATCH_SIZES = (1, 32)

Rows = Sequence[str | Mapping[str, Any]]
Predict = Callable[[Rows], object]


@dataclass(frozen=True)
class Effort:
    """How much is timed."""

    rounds: int = 10
    seconds: float = 120.0
    """For each batch size; where that is too short, turns have fewer calls, at least two."""


@dataclass(frozen=True)
class SpeedUp:
    """How many times faster than the reference; the bounds are the smallest and largest of the rounds."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Of one artifact at one batch size, in milliseconds a batch."""

    p50_ms: float
    p99_ms: float
    num_calls: int
    """Of few calls the 99th percentile is about the slowest."""
    speed_up: SpeedUp


Seconds = list[list[float]]
"""Of each round, those of each call."""


def time_in_turn(
    artifacts: Mapping[str, Predict],
    rows: Rows,
    batch_size: int,
    effort: Effort,
    ends: Callable[[], object] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Seconds]:
    """Seconds of `effort.rounds` turns of each artifact, all on the same batches of `rows`, over and over; of
    those until `ends`, at least one."""
    slowest = sum(_seconds(predict, _batch(rows, batch_size, 0), clock) for predict in artifacts.values())
    most = 20 if batch_size == 1 else 5
    calls = int(min(max(effort.seconds / (effort.rounds * max(slowest, 1e-9)) - 1, 2), most))
    keys = list(artifacts)
    seconds_of: dict[str, Seconds] = {key: [] for key in keys}
    for turn in range(effort.rounds):
        if turn and ends():
            break
        first = turn % len(keys)
        batches = [_batch(rows, batch_size, turn * calls + call) for call in range(calls)]
        for key in keys[first:] + keys[:first]:
            artifacts[key](batches[0])
            seconds_of[key].append([_seconds(artifacts[key], batch, clock) for batch in batches])
    return seconds_of


def timing(seconds: Seconds, reference: Seconds) -> Timing:
    """The latency, and the speed-up over `reference`, which was timed in the same rounds."""
    own, others = np.array(seconds), np.array(reference)
    ratios = np.median(others, axis=1) / np.median(own, axis=1)
    p50, p99 = np.percentile(own, [50, 99])
    return Timing(
        p50_ms=1000 * float(p50),
        p99_ms=1000 * float(p99),
        num_calls=own.size,
        speed_up=SpeedUp(float(np.median(others) / p50), float(ratios.min()), float(ratios.max())),
    )


def rows_of(examples: Sequence[Example]) -> Rows:
    return [
        {"text": example.text} | ({"segments": dict(example.segments)} if example.segments else {})
        for example in examples
    ]


@contextmanager
def batches_untold() -> Iterator[None]:
    """Keep `predict` from telling of each batch that it cut texts."""
    logger = logging.getLogger("hpo.inference")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _batch(rows: Rows, batch_size: int, index: int) -> Rows:
    return [rows[(index * batch_size + offset) % len(rows)] for offset in range(batch_size)]


def _seconds(predict: Predict, rows: Rows, clock: Callable[[], float]) -> float:
    started = clock()
    predict(rows)
    return clock() - started
