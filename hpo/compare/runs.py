"""The runs of a comparison as arrays: the score of each run, and what each row of the split adds to it.

Scores are times 100 (points), but `mae` and `rmse` are in the units of the labels; all are turned so that
higher is better. A metric that is no mean over rows has pseudo-values in place of rows: N times the metric
less N - 1 times that of all rows but one (the jackknife: Efron & Tibshirani 1993, chapter 11).

A pair is one configuration with one seed, under a precision and under fp32. It counts if fp32 has trained. A
precision that then ended without a score has the score 0, the worst; `mae` and `rmse` have no worst score, so
such a pair has no difference and forbids `as good`. A run that failed by a bug or the machine, or fell back
to another precision, says nothing about the precision, and its pair is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpo.compare.decision import Array, half_width
from hpo.compare.planning import effective
from hpo.config.comparison import REFERENCE, Arm
from hpo.config.objective import smaller_is_better
from hpo.config.study_config import StudyConfig
from hpo.data.tasks import Task
from hpo.outcome import Outcome
from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.training.metrics import RowStatistics, primary_mean
from hpo.trial.objectives import quality_objective, unit_of

Statistics = Mapping[str, RowStatistics]
"""Of one run, by task."""
Scored = tuple[float, Array]
"""The score of a run, and the pseudo-value of each example of the split."""

STORED_BYTES = "stored_bytes"
"""What the weights take, or the optimiser's moments, by what is compared."""
_NO_EVIDENCE = (Outcome.FAILED, Outcome.UNSUPPORTED, Outcome.INVALID)
"""A bug or the infrastructure, a device that lacks the precision, a fault that fp32 has too."""


@dataclass(frozen=True)
class Pair:
    """The runs of one configuration and seed."""

    ours: TrialRecord
    theirs: TrialRecord
    configuration: int
    """Its place in the plan."""


@dataclass(frozen=True)
class Differences:
    """What the pairs of a precision say in one metric."""

    pairs: tuple[Pair, ...]
    """Those that count."""
    of_runs: Array
    """Precision minus fp32, [pairs]; NaN where the precision has no score and there is no worst one."""
    of_rows: Array
    """What each row adds to their mean, [rows]."""

    @property
    def num_lost(self) -> int:
        """Pairs without a difference, since the precision did not train."""
        return int(np.isnan(self.of_runs).sum())


@dataclass(frozen=True)
class Ratio:
    """A geometric mean over pairs, with the interval that holds at every look (None: too few pairs), or of
    what is no measurement, as bytes that are stored, with the least and the largest."""

    ratio: float
    low: float | None
    high: float | None


class Runs:
    """The trials of a comparison that have ended.

    Args:
        study: the comparison, of which `record` is.
        statistics: what the rows say of each trial, by its number.
    """

    def __init__(
        self,
        record: StudyRecord,
        study: StudyConfig,
        tasks: Sequence[Task],
        statistics: Mapping[int, Statistics],
    ) -> None:
        assert study.comparison is not None
        self.plan = study.comparison
        self.split = "test" if study.evaluation.test else "validation"
        decides = quality_objective(study.objective)
        self.metric = decides.metric
        self._minimized = decides.direction == "minimize"
        self._tasks, self._statistics = tasks, statistics
        # A retry has the parameters of the trial that failed, and a higher number.
        ended = [trial for trial in record.trials if trial.state not in ("RUNNING", "WAITING")]
        self._trials = {_key(trial.params): trial for trial in ended}
        self._scored: dict[tuple[int, str], Scored | None] = {}

    @property
    def unit(self) -> str:
        return unit_of(self.metric)

    @property
    def task_metrics(self) -> tuple[str, ...]:
        named = [f"{task.name}/{task.primary_metric}" for task in self._tasks]
        return tuple(name for name in named if name != self.metric) if len(named) > 1 else ()

    def trial(self, arm: Arm, index: int) -> TrialRecord | None:
        return self._trials.get(_key(self.plan.point(arm, index)))

    def scored(self, trial: TrialRecord, metric: str) -> Scored | None:
        key = (trial.number, metric)
        if key not in self._scored:
            statistics = self._statistics.get(trial.number)
            has_score = trial.outcome == Outcome.COMPLETE and statistics
            self._scored[key] = self._score(statistics, metric) if statistics and has_score else None
        return self._scored[key]

    def _score(self, statistics: Statistics, metric: str) -> Scored | None:
        factor = self._factor(metric)
        whole = _value({task: of.scores() for task, of in statistics.items()}, statistics, metric)
        if whole is None:
            return None
        without = _value({task: _without_each(of) for task, of in statistics.items()}, statistics, metric)
        num = max(of.num_examples for of in statistics.values())
        rows = num * float(whole) - (num - 1) * np.broadcast_to(without, (num,))
        return factor * float(whole), factor * np.where(np.isfinite(rows), rows, float(whole))

    def _factor(self, metric: str) -> int:
        """Makes scores of values: in the metric's unit, higher is better."""
        return (100 if unit_of(metric) == "points" else 1) * (-1 if self._is_minimized(metric) else 1)

    def has_worst(self, metric: str) -> bool:
        """Whether no score is below 0, which a run without one then counts as."""
        return unit_of(metric) == "points" and not self._is_minimized(metric)

    def _is_minimized(self, metric: str) -> bool:
        return self._minimized if metric == self.metric else smaller_is_better(metric)

    def says_nothing(self, trial: TrialRecord) -> bool:
        """Whether a trial tells nothing of the precision that it was to have."""
        ran = effective(trial, self.plan.setting)
        return trial.outcome in _NO_EVIDENCE or ran not in (None, trial.params[self.plan.setting])

    def pairs(self, precision: str) -> Iterator[Pair]:
        """All whose two trials have ended and tell something, seed by seed."""
        num_seeds = min(self.plan.num_seeds.get(name, 0) for name in (precision, REFERENCE))
        for index in range(num_seeds):
            for configuration in range(len(self.plan.configurations)):
                both = [self.trial((configuration, name), index) for name in (precision, REFERENCE)]
                ours, theirs = both
                if ours and theirs and not (self.says_nothing(ours) or self.says_nothing(theirs)):
                    yield Pair(ours, theirs, configuration)

    def differences(self, precision: str, metric: str) -> Differences:
        """Of the pairs in which fp32 has a score."""
        has_worst = self.has_worst(metric)
        pairs, of_runs, of_rows = [], [], []
        for pair in self.pairs(precision):
            theirs, ours = self.scored(pair.theirs, metric), self.scored(pair.ours, metric)
            if theirs is None:
                continue
            if ours is None:
                ours = (0.0 if has_worst else math.nan, np.zeros_like(theirs[1]))
            pairs.append(pair)
            of_runs.append(ours[0] - theirs[0])
            if np.isfinite(of_runs[-1]):
                of_rows.append(ours[1] - theirs[1])
        rows = np.mean(of_rows, axis=0) if of_rows else np.zeros(0)
        return Differences(tuple(pairs), np.array(of_runs, dtype=float), np.asarray(rows))

    def ratio(self, precision: str, attribute: str) -> Ratio | None:
        """Return a measured quantity relative to fp32; None where no pair measured it.

        All trials of a comparison run on one kind of device.
        """
        logs: list[float] = []
        for pair in self.pairs(precision):
            ours, theirs = (self._measured(one, attribute) for one in (pair.ours, pair.theirs))
            if ours and theirs and _threads(pair.ours) == _threads(pair.theirs):
                logs.append(math.log(ours / theirs))
        if not logs:
            return None
        return _range(np.array(logs)) if attribute == STORED_BYTES else _ratio(np.array(logs))

    def _measured(self, trial: TrialRecord, attribute: str) -> float | None:
        """What says how the precision does; None: nothing does. Speed and memory are of a trial that had its
        device alone, and `stored_bytes` what the weights take, or the moments."""
        value = trial.attributes.get(attribute)
        if attribute == STORED_BYTES:
            facts = trial.telemetry.get(self.plan.setting) or {}
            value = facts.get("bytes") or facts.get("observed", {}).get("weights_bytes")
        elif trial.telemetry.get("device", {}).get("shared"):
            return None
        return float(value) if value and trial.outcome == Outcome.COMPLETE else None


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)


def _value(metrics: Mapping[str, Mapping[str, Any]], statistics: Statistics, metric: str) -> Any:
    """A number, or an array where the metrics are arrays; None: the split has no row for it."""
    task, _, name = metric.rpartition("/")
    if task:
        return metrics[task].get(name)
    return primary_mean([of.task for of in statistics.values()], metrics)


def _without_each(statistics: RowStatistics) -> dict[str, Array]:
    """The metrics of all examples but one, [examples]; those that are not annotated change nothing."""
    whole, without = statistics.scores(), statistics.scores_without_each()
    per_example = {}
    for name, value in whole.items():
        per_example[name] = np.full(statistics.num_examples, value)
        per_example[name][statistics.index_N] = without[name]
    return per_example


def _threads(trial: TrialRecord) -> Any:
    return trial.telemetry.get("device", {}).get("num_threads")


def _range(logs: Array) -> Ratio:
    return Ratio(math.exp(float(logs.mean())), math.exp(float(logs.min())), math.exp(float(logs.max())))


def _ratio(logs: Array) -> Ratio:
    mean, width = float(logs.mean()), float(half_width(logs))
    known = math.isfinite(width)
    return Ratio(
        math.exp(mean), math.exp(mean - width) if known else None, math.exp(mean + width) if known else None
    )
