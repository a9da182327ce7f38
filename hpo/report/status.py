"""State of a study in numbers: trials by outcome, budget, workers, rate, estimated end.

Nothing here imports transformers, pandas or plotly, so `hpo status` starts faster.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from hpo.config.sections import MAX_TRIALS, BudgetConfig
from hpo.outcome import concerns_precision
from hpo.precision.table import PRECISION
from hpo.report.formats import format_seconds
from hpo.report.outlook import Outlook, stored_outlook
from hpo.study.reading.study_record import (
    StudyRecord,
    TrialRecord,
    best_trials,
    is_over,
    limit_counts,
    lost_weights,
    unverified_precisions,
)

UNSPENT_SHARE = 0.02
"""Largest unspent share of a budget without a reason."""


def study_status(record: StudyRecord) -> dict[str, Any]:
    """Return the content of `hpo status --json`. Times are UTC.

    Only trials with some training count for the rate: an immediate failure says nothing about the others.
    """
    trained = [trial for trial in record.trials if trial.ended and (trial.evaluations or trial.values)]
    hours = _busy_seconds(trained) / 3600
    workers = [worker for worker in record.workers if worker.alive]
    ahead = stored_outlook(record)
    hours_left = ahead.seconds / 3600 / num_shares(record) if ahead.cost and workers else None
    end = datetime.now(UTC) + timedelta(hours=hours_left) if hours_left else None
    return {
        "study": record.name,
        "state": record.state,
        "n_trials": sum(record.counts.values()),
        "trials": dict(record.counts),
        "states": dict(Counter(trial.state for trial in record.trials)),
        "foreign_trials": record.num_foreign,
        "outcomes": dict(Counter(trial.outcome for trial in record.trials)),
        "best": [
            {
                "number": trial.number,
                "values": dict(zip(record.metric_names, trial.values or (), strict=True)),
                "params": trial.params,
            }
            for trial in best_trials(record)
        ],
        "limits": limit_counts(record),
        "budget": budget_status(record, ahead),
        "workers": [
            {
                "id": worker.id,
                "number": worker.number,
                "host": worker.host,
                "device": worker.device,
                "job": worker.job,
                "trial": worker.trial_number,
                "last_seen": worker.last_seen.isoformat(timespec="seconds"),
                "silent_seconds": round(worker.silent_seconds, 1),
            }
            for worker in workers
        ],
        "warnings": record_warnings(record),
        "trials_per_hour": len(trained) / hours if hours else None,
        "estimated_end": end and end.isoformat(timespec="seconds"),
    }


def record_warnings(record: StudyRecord) -> list[str]:
    """Warn of trials with lost weights or an unverified precision."""
    return [" ".join(pair) for pair in (*lost_weights(record), *unverified_precisions(record))]


def num_shares(record: StudyRecord) -> int:
    """Return the number of live workers, or under a budget of their devices: they spend time at once."""
    live = [worker for worker in record.workers if worker.alive]
    if record.definition.get("budget") is None:
        return len(live)
    return len({(worker.host, worker.device or worker.id) for worker in live})


def budget_status(record: StudyRecord, ahead: Outlook | None = None) -> dict[str, Any] | None:
    """Return the spent and remaining device-hours, and the reason if some stay unspent; None: no budget."""
    definition = record.definition.get("budget")
    if definition is None:
        return None
    trials = {trial.number: trial for trial in record.trials}
    by_precision: dict[str, float] = defaultdict(float)
    by_outcome: dict[str, float] = defaultdict(float)
    for number, seconds in record.spent.items():
        if trial := trials.get(number):
            by_outcome[trial.outcome] += seconds / 3600
            if not concerns_precision(trial.outcome, trial.telemetry):
                continue
            requested = trial.telemetry.get("precision", {}).get("requested") or trial.params.get(PRECISION)
            by_precision[requested or "not known yet"] += seconds / 3600
    spent, hours = sum(record.spent.values()) / 3600, BudgetConfig.model_validate(definition).hours
    return {
        "hours": hours,
        "spent_hours": spent,
        "left_hours": max(0.0, hours - spent),
        "by_precision": dict(by_precision),
        "by_outcome": dict(by_outcome),
        "unspent": _unspent_message(record, hours - spent, ahead or stored_outlook(record)),
    }


def _unspent_message(record: StudyRecord, hours_left: float, ahead: Outlook) -> str:
    """Tell why a study ended before its budget; empty if it goes on, or hardly anything is left."""
    if not is_over(record) or hours_left <= UNSPENT_SHARE * record.definition["budget"]["hours"]:
        return ""
    if record.state == "cancelled":
        reason = "the study was cancelled"
    elif record.counts["done"] >= record.definition.get("n_trials", MAX_TRIALS):
        reason = f"all of the study's {record.counts['done']} trials have ended. Raise `n_trials`"
    elif ahead.cost is None:
        reason = "no trial has trained"
    else:
        next_trial = format_seconds(ahead.next_seconds)
        reason = f"one more trial, with the continuation of the best, takes about {next_trial}"
    return f"{format_seconds(3600 * hours_left)} of device time are not spent, because {reason}."


def _busy_seconds(trials: Iterable[TrialRecord]) -> float:
    """Seconds with at least one of these trials running, without pauses of the study."""
    ends = [(trial.ended.timestamp(), trial.active_seconds or 0.0) for trial in trials if trial.ended]
    busy, until = 0.0, 0.0
    for begin, end in sorted((end - seconds, end) for end, seconds in ends):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy
