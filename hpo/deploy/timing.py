"""The latency of `TrainedModel.predict` for several forms: texts in, predictions out.

Other programs slow down a machine at times, so the forms take turns on the same texts. The first call of a
turn does not count. The speed-up is the ratio of the medians of all rounds, with its range over the rounds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpo.tasks.example import Example

BATCH_SIZES = (1, 32)

Rows = Sequence[str | Mapping[str, Any]]
Predict = Callable[[Rows], object]
Seconds = list[list[float]]
"""Seconds of each call, by round."""


@dataclass(frozen=True)
class TimingBudget:
    """Amount of timing."""

    rounds: int = 10
    seconds: float = 120.0
    """Time for each batch size. If it is short, a turn has fewer calls, at least two."""


@dataclass(frozen=True)
class SpeedUp:
    """Speed relative to the reference. The bounds are the smallest and largest ratio of a round."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Latency of one form at one batch size, in milliseconds a batch."""

    p50_ms: float
    p99_ms: float
    num_calls: int
    speed_up: SpeedUp


def time_in_turn(
    forms: Mapping[str, Predict],
    rows: Rows,
    batch_size: int,
    budget: TimingBudget,
    should_stop: Callable[[], object] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Seconds]:
    """Time each form on the same batches of `rows`, round after round.

    Stops after a round if `should_stop`. Rounds begin with another form each.
    """
    slowest = sum(_seconds(predict, _batch(rows, batch_size, 0), clock) for predict in forms.values())
    most = 20 if batch_size == 1 else 5
    calls = int(min(max(budget.seconds / (budget.rounds * max(slowest, 1e-9)) - 1, 2), most))
    names = list(forms)
    seconds: dict[str, Seconds] = {name: [] for name in names}
    for turn in range(budget.rounds):
        if turn and should_stop():
            break
        first = turn % len(names)
        batches = [_batch(rows, batch_size, turn * calls + call) for call in range(calls)]
        for name in names[first:] + names[:first]:
            forms[name](batches[0])
            seconds[name].append([_seconds(forms[name], batch, clock) for batch in batches])
    return seconds


def timing(seconds: Seconds, reference: Seconds) -> Timing:
    """Return the latency, and the speed-up over a reference that was timed in the same rounds."""
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
    """Return examples as the rows that `TrainedModel.predict` takes."""
    return [
        {"text": example.text} | ({"segments": dict(example.segments)} if example.segments else {})
        for example in examples
    ]


def _batch(rows: Rows, batch_size: int, index: int) -> Rows:
    return [rows[(index * batch_size + offset) % len(rows)] for offset in range(batch_size)]


def _seconds(predict: Predict, rows: Rows, clock: Callable[[], float]) -> float:
    started = clock()
    predict(rows)
    return clock() - started
