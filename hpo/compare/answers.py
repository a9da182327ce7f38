"""What a comparison says, from the trials that it has so far.

Scores are of the test split where there is one, times 100 (points), turned so that higher is better. The
question of the objective decides when enough seeds were seen; the tasks' own metrics are shown with intervals
that hold together with it. Speed and memory are compared pair by pair: the two trials of a pair ran one after
the other on one device, and a pair that shared its device with other trials counts for neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hpo.compare.estimate import Ratio, ratio_estimate
from hpo.compare.sequential import Plan
from hpo.compare.verdict import Verdict, judge_paired, judge_tuned
from hpo.config.comparison import REFERENCE, Arm, ComparisonConfig
from hpo.config.study_config import MEASURED_METRICS, SMALLER_IS_BETTER, StudyConfig
from hpo.data.tasks import Task
from hpo.study.study_record import StudyRecord, TrialRecord
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
    speed: Ratio | None
    """Training examples per second over the reference's; None: there is no pair that tells."""
    memory: Ratio | None
    """Peak memory over the reference's."""
    is_noise_floor: bool = False
    """The reference against itself with other seeds."""

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
            "is_noise_floor": self.is_noise_floor,
        }


@dataclass(frozen=True)
class Answers:
    """All that a comparison of precisions says."""

    rows: tuple[Answer, ...]
    objective: str
    """The metric that decides."""
    margin: float

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
    speeds = {name: _ratio(scores, name, "train_examples_per_second") for name in others}
    memory = {name: _ratio(scores, name, "peak_memory_bytes") for name in others}
    rows: list[Answer] = []
    for metric in shown:
        for name, question in asked:
            verdict = _verdict(scores, plan, name, question, metric)
            rows.append(Answer(name, question, metric, verdict, speeds[name], memory[name]))
        rows.append(_noise_floor(scores, plan, metric))
    return Answers(tuple(rows), scores.objective, plan.margin)


def _verdict(scores: Scores, plan: Plan, precision: str, question: Question, metric: str) -> Verdict:
    value = scores.score(metric)
    arms_of, judge = (_paired, judge_paired) if question == "paired" else (_tuned, judge_tuned)
    ours, theirs = (
        [scores.of_arm(arm, value) for arm in arms_of(scores.plan, name)] for name in (precision, REFERENCE)
    )
    return judge(ours, theirs, plan)


def _noise_floor(scores: Scores, plan: Plan, metric: str) -> Answer:
    value = scores.score(metric)
    arms = _paired(scores.plan, REFERENCE)
    repeats = [arm.model_copy(update={"repeat": True}) for arm in arms]
    verdict = judge_paired(
        [scores.of_arm(arm, value) for arm in repeats], [scores.of_arm(arm, value) for arm in arms], plan
    )
    return Answer(REFERENCE, "paired", metric, verdict, None, None, is_noise_floor=True)


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


def _ratio(scores: Scores, precision: str, attribute: str) -> Ratio | None:
    """Of the pairs that ran alone, and both on one kind of device."""
    ours: list[list[float | None]] = []
    theirs: list[list[float | None]] = []
    for arm in _paired(scores.plan, precision):
        reference = arm.model_copy(update={"precision": REFERENCE})
        pairs = [
            (scores.trial(arm, index), scores.trial(reference, index))
            for index in range(scores.plan.seeds_of(arm))
        ]
        told = [_measured(one, other, attribute) for one, other in pairs]
        ours.append([pair[0] for pair in told])
        theirs.append([pair[1] for pair in told])
    if not any(value is not None for row in ours for value in row):
        return None
    return ratio_estimate(ours, theirs)


def _measured(
    one: TrialRecord | None, other: TrialRecord | None, attribute: str
) -> tuple[float | None, float | None]:
    trials = [trial for trial in (one, other) if trial is not None and trial.outcome == "complete"]
    devices = [trial.telemetry.get("device", {}) for trial in trials]
    if len(trials) < 2 or any(device.get("shared") for device in devices):
        return None, None
    if devices[0].get("name") != devices[1].get("name"):
        return None, None
    values = [trial.attributes.get(attribute) for trial in trials]
    return (None, None) if None in values else (values[0], values[1])
