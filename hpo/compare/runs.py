"""Runs of a comparison, in pairs: one configuration with one seed, under a precision and under fp32.

A run is no evidence about its precision after a bug, a fault of the machine, the model or the data, or a
fallback to another precision. Its pair does not count. A run that became NaN counts.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpo.compare.planning import effective_value
from hpo.config.comparison import REFERENCE, Arm
from hpo.config.study_config import StudyConfig
from hpo.evaluation.contributions import Scored, Statistics, scored
from hpo.evaluation.decision import Array, half_width
from hpo.evaluation.verdict import Facts, Question, facts_of
from hpo.outcome import Outcome
from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.tasks.kind import Task
from hpo.trial.objectives import quality_objective

STORED_BYTES = "stored_bytes"
"""Size of the weights, or of the optimiser's moments, by the compared setting."""
_NO_EVIDENCE = (Outcome.FAILED, Outcome.UNSUPPORTED, Outcome.INVALID)
"""A bug or the infrastructure, a device without the precision, a fault of fp32 too."""


@dataclass(frozen=True)
class Pair:
    """Runs of one configuration and seed."""

    ours: TrialRecord
    theirs: TrialRecord
    configuration: int
    """Index in the plan."""


@dataclass(frozen=True)
class Ratio:
    """Geometric mean over pairs, with an interval that holds after every round (None: too few pairs).

    Stored bytes are exact, so they have the smallest and the largest ratio.
    """

    ratio: float
    low: float | None
    high: float | None


class Runs:
    """Ended trials of a comparison.

    Args:
        record: record of the comparison.
        study: the comparison.
        statistics: statistics of the rows, by the number of the trial.
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
        self.metric = quality_objective(study.objective).metric
        self.tasks, self._statistics = tasks, statistics
        # A retry has the parameters of the trial that failed, and a higher number.
        ended = [trial for trial in record.trials if trial.state not in ("RUNNING", "WAITING")]
        self._trials = {_key(trial.params): trial for trial in ended}
        self._scored: dict[tuple[int, str], Scored | None] = {}

    @property
    def task_metrics(self) -> tuple[str, ...]:
        named = [f"{task.name}/{task.primary_metric}" for task in self.tasks]
        return tuple(name for name in named if name != self.metric) if len(named) > 1 else ()

    def trial(self, arm: Arm, index: int) -> TrialRecord | None:
        return self._trials.get(_key(self.plan.point(arm, index)))

    def scored(self, trial: TrialRecord, metric: str) -> Scored | None:
        """Score a trial. None: it ended without a model, or the metric is undefined."""
        key = (trial.number, metric)
        if key not in self._scored:
            statistics = self._statistics.get(trial.number)
            has_model = trial.outcome == Outcome.COMPLETE and statistics
            self._scored[key] = scored(statistics, metric) if statistics and has_model else None
        return self._scored[key]

    def facts(self, question: Question) -> Facts | None:
        """Return the facts about a metric from the first scored run, of fp32 if possible."""
        ended = sorted(self._trials.values(), key=lambda one: one.params[self.plan.setting] != REFERENCE)
        known = (self._statistics.get(one.number) for one in ended if self.scored(one, question.metric))
        first = next((one for one in known if one), None)
        return facts_of(first, question) if first else None

    def is_evidence(self, trial: TrialRecord) -> bool:
        """Return whether a trial counts for its requested precision."""
        effective = effective_value(trial, self.plan.setting)
        return trial.outcome not in _NO_EVIDENCE and effective in (None, trial.params[self.plan.setting])

    def pairs(self, precision: str) -> Iterator[Pair]:
        """Yield the pairs of ended trials that are evidence, seed by seed."""
        num_seeds = min(self.plan.num_seeds.get(name, 0) for name in (precision, REFERENCE))
        for index in range(num_seeds):
            for configuration in range(len(self.plan.configurations)):
                both = [self.trial((configuration, name), index) for name in (precision, REFERENCE)]
                ours, theirs = both
                if ours and theirs and self.is_evidence(ours) and self.is_evidence(theirs):
                    yield Pair(ours, theirs, configuration)

    def ratio(self, precision: str, attribute: str) -> Ratio | None:
        """Return a measured quantity relative to fp32; None if no pair measured it."""
        logs: list[float] = []
        for pair in self.pairs(precision):
            ours, theirs = (self._measured(one, attribute) for one in (pair.ours, pair.theirs))
            if ours and theirs and _threads(pair.ours) == _threads(pair.theirs):
                logs.append(math.log(ours / theirs))
        if not logs:
            return None
        return _range(np.array(logs)) if attribute == STORED_BYTES else _ratio(np.array(logs))

    def _measured(self, trial: TrialRecord, attribute: str) -> float | None:
        """A measurement of a complete trial. None: it has none, or shared its device."""
        value = trial.attributes.get(attribute)
        if attribute == STORED_BYTES:
            facts = trial.telemetry.get(self.plan.setting) or {}
            value = facts.get("bytes") or facts.get("observed", {}).get("weights_bytes")
        elif trial.telemetry.get("device", {}).get("shared"):
            return None
        return float(value) if value and trial.outcome == Outcome.COMPLETE else None


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)


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
