"""What a comparison says, from the trials that it has so far.

Scores are of the test split where there is one, times 100 (points), turned so that higher is better. The
question of the objective decides when enough seeds were seen; the tasks' own metrics are shown with intervals
that hold together with it. Speed and memory are compared pair by pair on each kind of device: the two
trials of a pair ran one after the other, and a pair that shared its device with others counts for neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hpo.compare.by_device import OnDevice, Pairs, by_device, differing_devices
from hpo.compare.estimate import Ratio
from hpo.compare.sequential import Plan
from hpo.compare.verdict import Verdict, judge_paired, judge_tuned
from hpo.config.comparison import REFERENCE, Arm, ComparisonConfig
from hpo.config.study_config import MEASURED_METRICS, SMALLER_IS_BETTER, StudyConfig
from hpo.data.tasks import Task
from hpo.study.study_record import StudyRecord, TrialRecord, device_kinds
from hpo.trial.objectives import objective_value

Question = Literal["paired", "tuned"]

Value = Callable[[TrialRecord], float | None]
"""Of a trial that has ended; None: it has none."""


@dataclass(frozen=True)
class Answer:
    """One precision in one metric, by one question."""

    precision: str
    question: Question
    metric: str
    verdict: Verdict
    devices: tuple[OnDevice, ...] = ()
    """The paired trials on each kind of device."""
    not_pooled: str = ""
    """Why the devices' differences are not to be put together; the verdict is of all of them."""
    is_noise_floor: bool = False
    """The reference against itself with other seeds."""

    @property
    def speed(self) -> Ratio | None:
        """Of the only kind of device; None: there is no pair that tells, or there are several kinds."""
        return self.devices[0].speed if len(self.devices) == 1 else None

    @property
    def memory(self) -> Ratio | None:
        """Likewise."""
        return self.devices[0].memory if len(self.devices) == 1 else None

    def as_json(self) -> dict[str, Any]:
        found = self.verdict
        return {
            "precision": self.precision,
            "question": self.question,
            "metric": self.metric,
            "verdict": found.verdict,
            "difference": found.difference,
            "low": found.low,
            "high": found.high,
            "num_seeds": found.num_seeds,
            "seeds_needed": found.seeds_needed,
            "num_failed": found.num_failed,
            "speed_ratio": self.speed and self.speed.ratio,
            "speed_ratio_low": self.speed and self.speed.low,
            "speed_ratio_high": self.speed and self.speed.high,
            "memory_ratio": self.memory and self.memory.ratio,
            "memory_ratio_low": self.memory and self.memory.low,
            "memory_ratio_high": self.memory and self.memory.high,
            "devices": [found.as_json() for found in self.devices],
            "not_pooled": self.not_pooled,
            "is_noise_floor": self.is_noise_floor,
        }


@dataclass(frozen=True)
class Answers:
    """All that a comparison of precisions says."""

    rows: tuple[Answer, ...]
    objective: str
    """The metric that decides."""
    margin: float
    devices: tuple[str, ...]
    """The kinds of device that the trials ran on."""

    def as_json(self) -> dict[str, Any]:
        return {"margin": self.margin, "verdicts": [row.as_json() for row in self.rows]}


class Scores:
    """The trials of a comparison by arm and seed.

    Args:
        tasks: of the data set.
    """

    def __init__(self, record: StudyRecord, study: StudyConfig, tasks: Sequence[Task]) -> None:
        assert study.comparison is not None
        self.plan = study.comparison
        self.tasks = tasks
        self.objective = study.objective[0].metric
        if self.objective in MEASURED_METRICS:
            self.objective = "score"
        self.on_test = study.evaluation.test
        self._direction = study.objective[0].direction
        # A retry has the parameters of the trial that failed, and a higher number.
        self._trials = {_key(trial.params): trial for trial in record.trials}
        self.kinds = device_kinds(record.trials)
        self.equal_time = study.training.max_seconds is not None or "max_seconds" in study.search_space

    @property
    def metrics(self) -> tuple[str, ...]:
        """The objective, and the primary metric of each task."""
        of_tasks = [f"{task.name}/{task.primary_metric}" for task in self.tasks]
        return tuple(dict.fromkeys([self.objective, *(of_tasks if len(of_tasks) > 1 else ())]))

    def score(self, metric: str, *, on_test: bool | None = None) -> Value:
        """Points of a trial, higher is better; on the test split where there is one, or as `on_test` says."""
        on_test = self.on_test if on_test is None else on_test
        smaller = metric.rpartition("/")[2] in SMALLER_IS_BETTER
        if metric == self.objective:
            smaller = self._direction == "minimize"

        def value(trial: TrialRecord) -> float | None:
            metrics = trial.telemetry.get("test_metrics" if on_test else "metrics")
            if trial.outcome != "complete" or metrics is None:
                return None
            task, _, name = metric.rpartition("/")
            found = metrics[task].get(name) if task else objective_value(metric, metrics, self.tasks, {})
            return None if found is None else 100 * (-found if smaller else found)

        return value

    def tells(self, metric: str) -> bool:
        """Whether the trials differ in a metric. One that none has learned would be as good everywhere."""
        value = self.score(metric)
        return len({value(trial) for trial in self._trials.values()} - {None}) > 1

    def of_arm(self, arm: Arm, value: Value) -> list[float | None]:
        """The values of an arm by seed, as far as its trials have ended."""
        found: list[float | None] = []
        for index in range(self.plan.seeds_of(arm)):
            trial = self.trial(arm, index)
            if trial is None:
                break
            found.append(value(trial))
        return found

    def trial(self, arm: Arm, index: int) -> TrialRecord | None:
        """The trial of an arm with the seed of this index, if it has ended."""
        seed = self.plan.seed(arm.configuration, index, repeat=arm.repeat)
        trial = self._trials.get(_key(self.plan.point(arm, seed)))
        return None if trial is None or trial.state in ("RUNNING", "WAITING") else trial


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)


def answer(scores: Scores, plan: Plan) -> Answers:
    """Judge every precision, by both questions and in all metrics.

    Args:
        plan: how the comparison is decided, but for its number of comparisons.
    """
    config = scores.plan
    others = [name for name in config.precisions if name != REFERENCE]
    asked: list[tuple[str, Question]] = []
    asked += [(name, "paired") for name in others if any(found.paired for found in config.configurations)]
    asked += [(name, "tuned") for name in others if _tuned(config, name) and _tuned(config, REFERENCE)]
    num_rows = len(asked) + 1
    plan = replace(plan, num_comparisons=num_rows * len(scores.metrics))
    shown = [name for name in scores.metrics if name == scores.objective or scores.tells(name)]
    rows: list[Answer] = []
    for metric in shown:
        rows += [_row(scores, plan, name, question, metric) for name, question in asked]
        rows.append(_noise_floor(scores, plan, metric))
    return Answers(tuple(rows), scores.objective, plan.margin, tuple(sorted(set(scores.kinds.values()))))


def _row(scores: Scores, plan: Plan, precision: str, question: Question, metric: str) -> Answer:
    value = scores.score(metric)
    arms_of, judge = (_paired, judge_paired) if question == "paired" else (_tuned, judge_tuned)
    ours, theirs = (
        [scores.of_arm(arm, value) for arm in arms_of(scores.plan, name)] for name in (precision, REFERENCE)
    )
    pairs = _pairs(scores, precision)
    devices = by_device(pairs, scores.kinds, value)
    not_pooled = _why_not_pooled(scores, pairs, devices, value)
    return Answer(precision, question, metric, judge(ours, theirs, plan), devices, not_pooled)


def _noise_floor(scores: Scores, plan: Plan, metric: str) -> Answer:
    value = scores.score(metric)
    arms = _paired(scores.plan, REFERENCE)
    repeats = [arm.model_copy(update={"repeat": True}) for arm in arms]
    verdict = judge_paired(
        [scores.of_arm(arm, value) for arm in repeats], [scores.of_arm(arm, value) for arm in arms], plan
    )
    return Answer(REFERENCE, "paired", metric, verdict, is_noise_floor=True)


def _paired(config: ComparisonConfig, precision: str) -> list[Arm]:
    return [
        Arm(configuration=number, precision=precision)
        for number, found in enumerate(config.configurations)
        if found.paired
    ]


def _tuned(config: ComparisonConfig, precision: str) -> list[Arm]:
    return [
        Arm(configuration=number, precision=precision)
        for number, found in enumerate(config.configurations)
        if precision in found.tuned
    ]


def _pairs(scores: Scores, precision: str) -> Pairs:
    """The trials of the paired configurations under a precision, beside those of the reference."""
    return [
        [
            (scores.trial(arm, index), scores.trial(arm.model_copy(update={"precision": REFERENCE}), index))
            for index in range(scores.plan.seeds_of(arm))
        ]
        for arm in _paired(scores.plan, precision)
    ]


def _why_not_pooled(scores: Scores, pairs: Pairs, devices: Sequence[OnDevice], value: Value) -> str:
    """Why the pairs of several kinds of device are no evidence together; empty: they are."""
    if len(devices) < 2:
        return ""
    if scores.equal_time:
        return "trials have equal time (max_seconds), in which a faster device trains more"
    if differing := differing_devices(pairs, scores.kinds, value):
        told = {found.device: found.difference for found in devices}
        return "its paired difference is " + " and ".join(
            f"{told[device]:+.2f} on {device}" for device in differing
        )
    return ""
