"""Bootstrap intervals of metrics (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).

The examples of the split are drawn with replacement, and every metric is computed of each resample. All
tasks, and both parts of a difference, have the same resamples. The interval says how far the metric of this
model would move on another sample of such texts. It says nothing about another seed or another kind of text.
Examples count as independent.

A percentile interval is exact only for many rows: with 20 rows, about 93 % of the 95 % intervals cover a
mean. An interval that would end before the value of its metric is extended to it. A metric that is the same
in all resamples has an interval without width, which is no proof of perfection.

`f1_macro` is the mean over the classes that are true in the split; a class that is missing in a resample
keeps its F1 of the whole. In simulations with classes of about 3, 5, 10 and 20 rows among common ones, 70,
88, 89 and 96 % of the 95 % intervals covered `f1_macro` of the population.

There are no bounds where a metric is defined in no resample, or a task has fewer than two annotated rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.training.metrics import RowStatistics, primary_mean

NUM_RESAMPLES = 1000
LEVEL = 0.95
_SEED = 0
_WEIGHTS_AT_ONCE = 2**23
"""So many weights, of 8 bytes, are held at a time."""

Samples = NDArray[np.float64]
"""The values of one metric in the resamples, NaN where it is not defined: [B]."""


@dataclass(frozen=True)
class Interval:
    """The value of a metric, and the bounds of its interval; None where the rows give none."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class MetricIntervals:
    """Of every metric of every task, and of their `score`."""

    score: Interval | None
    """The mean of the tasks' primary metrics; None where no task has one."""
    tasks: Mapping[str, Mapping[str, Interval]]


def metric_intervals(
    statistics: Mapping[str, RowStatistics], *, num_resamples: int = NUM_RESAMPLES, level: float = LEVEL
) -> MetricIntervals:
    """The intervals of the tasks' metrics, of statistics of one split by task."""
    return _intervals(_values(statistics), _samples(statistics, num_resamples), level)


def difference_intervals(
    statistics: Mapping[str, RowStatistics],
    reference: Mapping[str, RowStatistics],
    *,
    num_resamples: int = NUM_RESAMPLES,
    level: float = LEVEL,
) -> MetricIntervals:
    """The intervals of `statistics - reference`, metric by metric, of two sets of predictions of the same
    examples.

    They are paired: in each resample both sides see the same examples, so what is hard for both cancels out,
    and the interval is narrower than those of the sides. Metrics that one side lacks are left out. Raises
    ValueError where the examples are not the same.
    """
    for name, ours in statistics.items():
        theirs = reference.get(name)
        if theirs is None or len(reference) != len(statistics):
            what = f"{sorted(statistics)} and {sorted(reference)}"
            raise ValueError(f"a paired difference needs the same tasks, but got {what}.")
        if ours.num_examples != theirs.num_examples or not np.array_equal(ours.index_N, theirs.index_N):
            raise ValueError(f"a paired difference needs the same annotated examples of task {name}.")
    sides = [(_values(side), _samples(side, num_resamples)) for side in (statistics, reference)]
    (values, samples), (other_values, other_samples) = sides
    return _intervals(_difference(values, other_values), _difference(samples, other_samples), level)


_ByTask = dict[str, dict[str, Any]]
_SCORE = ""
"""What the score of all tasks is kept under, beside the tasks."""


def _values(statistics: Mapping[str, RowStatistics]) -> _ByTask:
    return _with_score(statistics, {name: dict(of.scores()) for name, of in statistics.items()})


def _samples(statistics: Mapping[str, RowStatistics], num_resamples: int) -> _ByTask:
    """{task: {metric: values [B]}} of the metrics that the whole has; the resamples depend on the number of
    examples alone.
    """
    samples: _ByTask = {
        name: {metric: np.full(num_resamples, np.nan) for metric in of.scores()}
        for name, of in statistics.items()
    }
    num_examples = max((of.num_examples for of in statistics.values()), default=0)
    first = 0
    for weights_BE in _resamples(num_examples, num_resamples):
        for name, of in statistics.items():
            if of.num_rows < 2 or not samples[name]:
                continue
            weighted = of.weighted_scores(weights_BE)
            for metric, values_B in samples[name].items():
                values_B[first : first + len(weights_BE)] = weighted[metric]
        first += len(weights_BE)
    return _with_score(statistics, samples)


def _resamples(num_examples: int, num_resamples: int) -> Iterator[NDArray[np.float64]]:
    """How often each example was drawn: pieces of [num_resamples, num_examples]."""
    if not num_examples:
        return
    rng = np.random.default_rng(_SEED)
    at_once = max(1, _WEIGHTS_AT_ONCE // num_examples)
    for first in range(0, num_resamples, at_once):
        weights_BE = np.empty((min(at_once, num_resamples - first), num_examples))
        for weights_E in weights_BE:
            weights_E[:] = np.bincount(rng.integers(0, num_examples, num_examples), minlength=num_examples)
        yield weights_BE


def _with_score(statistics: Mapping[str, RowStatistics], metrics: _ByTask) -> _ByTask:
    mean = primary_mean([of.task for of in statistics.values()], metrics)
    return metrics if mean is None else metrics | {_SCORE: {"score": mean}}


def _difference(ours: _ByTask, theirs: _ByTask) -> _ByTask:
    return {
        name: {metric: value - theirs[name][metric] for metric, value in of.items() if metric in theirs[name]}
        for name, of in ours.items()
        if name in theirs
    }


def _intervals(values: _ByTask, samples: _ByTask, level: float) -> MetricIntervals:
    intervals = {
        name: {metric: _interval(value, samples[name][metric], level) for metric, value in of_task.items()}
        for name, of_task in values.items()
    }
    return MetricIntervals(intervals.pop(_SCORE, {}).get("score"), intervals)


def _interval(value: float, samples_B: Samples, level: float) -> Interval:
    defined = samples_B[np.isfinite(samples_B)]
    if not len(defined):
        return Interval(value, None, None)
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return Interval(value, min(low, value), max(high, value))
