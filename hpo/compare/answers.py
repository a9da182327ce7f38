"""What a comparison says, from the trials that it has so far.

Scores are of the test split where there is one, times 100 (points) but for `mae` and `rmse`, which are in the
units of the labels. All are turned so that higher is better: a positive difference speaks for the precision,
whatever the metric. The margin is in the unit of the objective; metrics in another one have none, and no
verdict.

The rows of the objective decide, and they alone: a precision by a question is one comparison, and these share
the whole of alpha, as the primary family of a trial does (gatekeeping: Westfall & Krishen, Journal of
Statistical Planning and Inference 2001; FDA, Multiple Endpoints in Clinical Trials, 2022). The tasks' own
metrics are a second family, with an alpha of their own and a correction for their number. They are shown and
never decide: no sentence and no further seed depends on them, so they take no power from the objective. The
noise floor is no test, and is in neither family. That a precision is faster is a third family, over
precisions, questions and kinds of device, with the levels of the looks too.

Tuned against tuned, both sides have the same number of configurations: the best of each, as many as the side
with fewer has. A mean over the three best of fp32 would lie below the one best of another precision for no
other reason than that it takes in its third.

Speed and memory are compared on each kind of device, pair by pair: the two trials of a pair ran one after the
other, and a pair that shared its device with others counts for neither. Those of the tuned question are of
the tuned configurations, so a recommendation never quotes the speed of others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hpo.compare.by_device import OnDevice, Pairs, by_device, differing_devices, tuned_by_device
from hpo.compare.estimate import Ratio, ratio_json
from hpo.compare.sequential import Plan
from hpo.compare.verdict import Verdict, judge_paired, judge_tuned
from hpo.config.comparison import REFERENCE, Arm, ComparisonConfig
from hpo.config.study_config import SMALLER_IS_BETTER, StudyConfig
from hpo.data.tasks import Task
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION
from hpo.study.study_record import StudyRecord, TrialRecord, device_kinds
from hpo.trial.objectives import objective_value, quality_objective, unit_of

Question = Literal["paired", "tuned"]

Value = Callable[[TrialRecord], float | None]
"""Of a trial that has ended; None: it has none, NaN: it says nothing of its precision."""

_NO_EVIDENCE = (Outcome.FAILED, Outcome.UNSUPPORTED)
"""A bug or the infrastructure; a device that lacks the precision."""


@dataclass(frozen=True)
class Answer:
    """One precision in one metric, by one question."""

    precision: str
    question: Question
    metric: str
    verdict: Verdict
    num_configurations: int
    """Of each side."""
    devices: tuple[OnDevice, ...] = ()
    """What the trials of each kind of device say: by pairs, or of the tuned configurations."""
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
            "unit": unit_of(self.metric),
            "verdict": found.verdict,
            "difference": found.difference,
            "low": found.low,
            "high": found.high,
            "num_configurations": self.num_configurations,
            "num_seeds": found.num_seeds,
            "seeds_needed": found.seeds_needed,
            "num_failed": found.num_failed,
            "num_reference_failed": found.num_reference_failed,
            "reason": found.reason,
            **ratio_json("speed_ratio", self.speed),
            **ratio_json("memory_ratio", self.memory),
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
        unit = unit_of(self.objective)
        return {"margin": self.margin, "unit": unit, "verdicts": [row.as_json() for row in self.rows]}


class Scores:
    """The trials of a comparison by arm and seed.

    Args:
        tasks: of the data set.
    """

    def __init__(self, record: StudyRecord, study: StudyConfig, tasks: Sequence[Task]) -> None:
        assert study.comparison is not None
        self.plan = study.comparison
        self.tasks = tasks
        decides = quality_objective(study.objective)
        self.objective = decides.metric
        self.on_test = study.evaluation.test
        self._direction = decides.direction
        # A retry has the parameters of the trial that failed, and a higher number.
        self._trials = {_key(trial.params): _as_asked(trial) for trial in record.trials}
        self.kinds = device_kinds(record.trials)
        self.equal_time = study.training.max_seconds is not None or "max_seconds" in study.search_space

    @property
    def metrics(self) -> tuple[str, ...]:
        """The objective, and the primary metric of each task."""
        of_tasks = [f"{task.name}/{task.primary_metric}" for task in self.tasks]
        return tuple(dict.fromkeys([self.objective, *(of_tasks if len(of_tasks) > 1 else ())]))

    def score(self, metric: str, *, on_test: bool | None = None) -> Value:
        """Of a trial, in `unit_of(metric)`, higher is better; on the test split where there is one, or as
        `on_test` says."""
        on_test = self.on_test if on_test is None else on_test
        smaller = metric.rpartition("/")[2] in SMALLER_IS_BETTER
        if metric == self.objective:
            smaller = self._direction == "minimize"
        factor = (100 if unit_of(metric) == "points" else 1) * (-1 if smaller else 1)

        def value(trial: TrialRecord) -> float | None:
            metrics = trial.telemetry.get("test_metrics" if on_test else "metrics")
            if trial.outcome in _NO_EVIDENCE:
                return math.nan
            if trial.outcome != "complete" or metrics is None:
                return None
            task, _, name = metric.rpartition("/")
            found = metrics[task].get(name) if task else objective_value(metric, metrics, self.tasks, {})
            return None if found is None else factor * found

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


def _as_asked(trial: TrialRecord) -> TrialRecord:
    """A trial that fell back to another precision says nothing of the one that it asked for."""
    effective = trial.attributes.get("fp_precision_effective")
    if effective in (None, trial.params[PRECISION]):
        return trial
    return replace(trial, outcome=Outcome.UNSUPPORTED)


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
    kinds = set(scores.kinds.values())
    speed_plan = replace(plan, num_comparisons=max(len(asked) * len(kinds), 1))
    rows: list[Answer] = []
    for metric in scores.metrics:
        decides = metric == scores.objective
        if decides or scores.tells(metric):
            num_metrics = 1 if decides else len(scores.metrics) - 1
            margin = plan.margin if unit_of(metric) == unit_of(scores.objective) else math.nan
            family = replace(plan, num_comparisons=max(len(asked), 1) * num_metrics, margin=margin)
            rows += [_row(scores, family, speed_plan, name, question, metric) for name, question in asked]
            rows.append(_noise_floor(scores, family, metric))
    return Answers(tuple(rows), scores.objective, plan.margin, tuple(sorted(kinds)))


def _row(
    scores: Scores, plan: Plan, speed_plan: Plan, precision: str, question: Question, metric: str
) -> Answer:
    value = scores.score(metric)
    is_paired = question == "paired"
    arms_of, judge = (_paired, judge_paired) if is_paired else (_tuned, judge_tuned)
    both = [arms_of(scores.plan, name) for name in (precision, REFERENCE)]
    num = min(map(len, both))  # the search's best of each, and as many: more of them have a lower mean
    ours, theirs = ([scores.of_arm(arm, value) for arm in arms[:num]] for arms in both)
    num_seeds = min(scores.plan.seeds_of(arm) for arms in both for arm in arms[:num])
    level = dict(zip(speed_plan.looks, speed_plan.levels, strict=True))[num_seeds]
    pairs = _pairs(scores, precision)
    of_pairs = by_device(pairs, scores.kinds, value, level)
    not_pooled = _why_not_pooled(scores, pairs, of_pairs, value)
    devices = of_pairs
    if not is_paired:
        tuned, tuned_reference = (
            [[scores.trial(arm, index) for index in range(num_seeds)] for arm in arms[:num]] for arms in both
        )
        devices = tuned_by_device(tuned, tuned_reference, scores.kinds, value, level)
    return Answer(precision, question, metric, judge(ours, theirs, plan), num, devices, not_pooled)


def _noise_floor(scores: Scores, plan: Plan, metric: str) -> Answer:
    value = scores.score(metric)
    arms = _paired(scores.plan, REFERENCE)
    repeats = [arm.model_copy(update={"repeat": True}) for arm in arms]
    verdict = judge_paired(
        [scores.of_arm(arm, value) for arm in repeats], [scores.of_arm(arm, value) for arm in arms], plan
    )
    return Answer(REFERENCE, "paired", metric, verdict, len(arms), is_noise_floor=True)


def _paired(config: ComparisonConfig, precision: str) -> list[Arm]:
    return [
        Arm(configuration=number, precision=precision)
        for number, found in enumerate(config.configurations)
        if found.paired
    ]


def _tuned(config: ComparisonConfig, precision: str) -> list[Arm]:
    """The best first."""
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
