"""A stored study as plain values: the outcomes of its trials, and the best of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np

from hpo.config.limits import MEASURED_METRICS, violation
from hpo.device import DeviceInfo
from hpo.device_time import REMEDY, busy_text
from hpo.errors import first_names
from hpo.json_safe import is_number
from hpo.outcome import Outcome
from hpo.study.sampling.fronts import loss_signs, pareto_front
from hpo.study.sampling.promotion import is_at_rung
from hpo.study.store.schema import EvaluationRow

MOST_SKIPPED = 0.05
"""Largest share of skipped steps of a trial without a warning."""
LEAST_MOVED = 0.5
"""Smallest share of weights in bf16 that a trial's steps move without a warning."""


@dataclass(frozen=True)
class TrialRecord:
    """One Optuna trial."""

    number: int
    state: str  # Optuna's state: RUNNING, WAITING, COMPLETE, PRUNED or FAIL
    outcome: str
    """Stored outcome, or the state in small letters. A RUNNING trial is `running`, `paused` at a rung, or
    `preempted` if no worker has it."""
    reason: str
    params: Mapping[str, Any]
    values: tuple[float, ...] | None  # one for each objective of a COMPLETE trial, else None
    started: datetime | None
    ended: datetime | None  # both UTC, with their time zone
    seconds: float | None
    attributes: dict[str, Any]
    """User attributes but the telemetry; `worker` is the last worker that had the trial."""
    constraints: Mapping[str, float] = field(default_factory=dict)
    """Optuna's: of the study's limits, and `limits.FEASIBLE`."""
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Sequence[EvaluationRow] = ()
    trained_seconds: float | None = None  # seconds of training at its last evaluation; None: there is none
    detailed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Detailed evaluations of its best checkpoint by split, as JSON."""

    @property
    def active_seconds(self) -> float | None:
        active: float | None = self.attributes.get("active_seconds")
        return self.seconds if active is None else active


@dataclass(frozen=True)
class WorkerRecord:
    """A present or former worker process of the study."""

    id: str
    host: str
    pid: int
    started: datetime  # UTC, as `last_seen`
    last_seen: datetime
    alive: bool  # true if its heartbeat is recent, see `Storage.heard_workers`
    trial_number: int | None
    number: int = 0
    device: str | None = None  # `DeviceInfo.device_id` of its device
    job: str | None = None
    left_out: Sequence[str] = ()  # precisions that its device lacks
    silent_seconds: float = 0.0  # seconds since its last heartbeat, by the database's clock


@dataclass(frozen=True)
class StudyRecord:
    """Everything stored about a study."""

    name: str
    metric_names: tuple[str, ...]
    directions: tuple[str, ...]  # `minimize` or `maximize` for each metric
    definition: dict[str, Any]  # the study file, without its path
    trials: list[TrialRecord]
    workers: list[WorkerRecord]
    counts: dict[str, int]
    """Numbers of trials that are `open`, `running`, `done` and, if any, `paused`; see `count_trials`."""
    state: str = "open"  # `open`, `paused` or `cancelled`
    spent: Mapping[int, float] = field(default_factory=dict)
    """Device-seconds by the trial's number, if the study has a budget."""
    num_foreign_running: int = 0  # number of RUNNING foreign trials
    num_foreign: int = 0
    """Number of trials from somebody else (`hpo.study.store.foreign`), without a record in `trials`."""
    comparisons: Mapping[str, Any] = field(default_factory=dict)
    """Results of `hpo compare` by question: `precisions`, `configurations` or another."""


def is_over(record: StudyRecord) -> bool:
    return record.state == "cancelled" or record.counts["done"] == sum(record.counts.values())


def device_kinds(trials: Sequence[TrialRecord]) -> dict[int, str]:
    """Return the known kinds of device by the trial's number. Kinds may differ in instructions alone."""
    kinds = {
        trial.number: DeviceInfo.from_facts(device).kind
        for trial in trials
        if (device := trial.telemetry.get("device"))
    }
    names = {trial.number: trial.telemetry["device"]["name"] for trial in trials if trial.number in kinds}
    kinds_of_name: dict[str, set[str]] = {}
    for number, name in names.items():
        kinds_of_name.setdefault(name, set()).add(kinds[number])
    return {
        number: name if len(kinds_of_name[name]) == 1 else kinds[number] for number, name in names.items()
    }


def complete_trials(record: StudyRecord) -> list[TrialRecord]:
    """Return the trained and evaluated trials, each with finite values."""
    return [
        trial
        for trial in record.trials
        if trial.outcome == Outcome.COMPLETE and trial.values and all(map(is_number, trial.values))
    ]


def choosable_trials(record: StudyRecord) -> list[TrialRecord]:
    return [trial for trial in complete_trials(record) if not violation(trial.constraints)]


def nearest_message(record: StudyRecord) -> str:
    """Name the nearest trial if there are complete trials and none meets the limits; otherwise empty."""
    if choosable_trials(record) or not (trials := best_trials(record)):
        return ""
    trial = trials[0]
    nearest = f"Trial {trial.number} is the nearest: {trial.reason}"
    return f"No complete trial meets the limits of the study. {nearest}"


def limit_counts(record: StudyRecord) -> dict[str, Any]:
    """Count the trials: `complete`, `met` the limits, `ended_early`, `broken` by limit; {} without limits."""
    limits = record.definition.get("constraints") or {}
    if not limits:
        return {}
    complete, early = complete_trials(record), [trial for trial in record.trials if _ended_by_limit(trial)]
    broken = {
        metric: sum(trial.constraints.get(metric, 0.0) > 0 for trial in (*complete, *early))
        for metric in limits
    }
    met = len(choosable_trials(record))
    return {"complete": len(complete), "met": met, "ended_early": len(early), "broken": broken}


def _ended_by_limit(trial: TrialRecord) -> bool:
    costs = {name: value for name, value in trial.constraints.items() if name in MEASURED_METRICS}
    is_pruned = trial.outcome == Outcome.PRUNED and not is_at_rung(trial.attributes)
    return is_pruned and violation(costs) > 0


def best_trials(record: StudyRecord) -> list[TrialRecord]:
    """Return the best complete trial; with several objectives the Pareto front, sorted by the first.

    Only trials within the limits of the study count. If there is none, return the nearest.
    """
    complete = choosable_trials(record)
    if not complete:
        nearest = sorted(complete_trials(record), key=lambda trial: violation(trial.constraints))
        return nearest[:1]
    if len(record.metric_names) == 1:
        best = max if record.directions == ("maximize",) else min
        return [best(complete, key=lambda trial: trial.values or ())]
    values = np.array([trial.values for trial in complete], dtype=float)
    losses = values * loss_signs(record.directions)
    front = np.flatnonzero(pareto_front(values, record.directions))
    return [complete[index] for index in front[losses[front, 0].argsort(kind="stable")]]


def with_evaluation(record: StudyRecord, number: int, document: Mapping[str, Any]) -> StudyRecord:
    trials = [
        replace(trial, detailed={**trial.detailed, document["split"]: document})
        if trial.number == number
        else trial
        for trial in record.trials
    ]
    return replace(record, trials=trials)


def lost_weights(record: StudyRecord) -> list[tuple[str, str]]:
    """Return a sentence on complete trials without their best weights, and its meaning."""
    lost = [trial for trial in complete_trials(record) if trial.telemetry.get("weights_lost")]
    if not lost:
        return []
    problems = lost[-1].telemetry.get("checkpoint_problems") or ("the reason is not known.",)
    trials = f"trial{'s' * (len(lost) > 1)} {', '.join(str(trial.number) for trial in lost)}"
    return [
        (
            f"The best weights of {trials} were not kept: {problems[-1]}",
            "Their values are right, but the stored model is that of an older evaluation, or there is none.",
        )
    ]


def lost_updates(record: StudyRecord) -> list[tuple[str, str]]:
    """Return a sentence on trials that skipped steps or rounded their updates away, and its meaning."""
    skips, still = [], []
    for trial in record.trials:
        skipped = (trial.telemetry.get("scaler") or {}).get("skipped_steps") or 0
        num_steps, moved = trial.telemetry.get("num_steps") or 0, trial.telemetry.get("moved_share")
        if num_steps and skipped / num_steps > MOST_SKIPPED:
            skips.append(f"trial {trial.number} skipped {skipped} of {num_steps} ({skipped / num_steps:.0%})")
        if moved is not None and moved < LEAST_MOVED:
            still.append(f"{moved:.0%} in trial {trial.number}")
    pairs = []
    if skips:
        text = f"Steps were skipped, because gradients were not finite: {first_names(skips, 8)}."
        pairs.append((text, "A skipped step teaches nothing. Lower `init_scale`, or use bf16 or fp32."))
    if still:
        text = f"Steps moved few weights in bf16: {first_names(still, 8)}. Smaller updates round to nothing."
        pairs.append((text, "Raise `learning_rate`, or use `bf16`, which keeps the weights in fp32."))
    return pairs


def busy_devices(record: StudyRecord) -> list[tuple[str, str]]:
    """Return a sentence on trials whose device was busy with other programs, and its remedy."""
    texts = {trial.number: busy_text(trial.telemetry.get("device_time")) for trial in record.trials}
    busy = [f"trial {number} ({text})" for number, text in texts.items() if text]
    text = f"The device was busy in {len(busy)} of {len(texts)} trials: {first_names(busy, 3)}."
    return [(text, f"Their speed is in no comparison. {REMEDY}")] if busy else []


def unverified_precisions(record: StudyRecord) -> list[tuple[str, str]]:
    """Return a sentence on trials with an unverified precision and the reasons, and its meaning."""
    facts = {trial.number: trial.telemetry.get("precision") or {} for trial in record.trials}
    unverified = {
        number: of for number, of in facts.items() if of.get("observed") and of.get("agrees") is None
    }
    if not unverified:
        return []
    reasons = {of.get("observed_reason") or "no reason." for of in unverified.values()}
    count = len(unverified)
    numbers = first_names([*map(str, unverified)], 8)
    text = f"The precision of {count} trial{'s' * (count > 1)} (number {numbers}) is unverified: "
    meaning = "No observation contradicts it, so they count for the precision that they ran in."
    return [(text + " ".join(sorted(reasons)[:3]), f"{meaning} Check the named layers, or run `hpo verify`.")]
