"""The state of a study in numbers: trials by outcome, workers, rate, estimated end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpo.study.study_record import StudyRecord, TrialRecord


def study_status(record: StudyRecord) -> dict[str, Any]:
    """A study's state in numbers: what `hpo status --json` prints. Times are UTC.

    Rate and estimated end are those of trials that trained: one that ends at once says nothing of the others.
    """
    from collections import Counter
    from datetime import UTC, datetime, timedelta

    from hpo.study.study_record import best_trials

    remaining = record.slots["open"] + record.slots["running"]
    trained = [trial for trial in record.trials if trial.ended and (trial.evaluations or trial.values)]
    hours = _busy_seconds(trained) / 3600
    rate = len(trained) / hours if hours else None
    end = None
    if rate and remaining and any(worker.alive for worker in record.workers):
        end = (datetime.now(UTC) + timedelta(hours=remaining / rate)).isoformat(timespec="seconds")
    return {
        "study": record.name,
        "n_trials": sum(record.slots.values()),
        "trials": dict(record.slots),
        "states": dict(Counter(trial.state for trial in record.trials)),
        "outcomes": dict(Counter(trial.outcome for trial in record.trials)),
        "best": [
            {
                "number": trial.number,
                "values": dict(zip(record.metric_names, trial.values or (), strict=True)),
                "params": trial.params,
            }
            for trial in best_trials(record)
        ],
        "workers": [
            {
                "id": worker.id,
                "host": worker.host,
                "trial": worker.trial_number,
                "last_seen": worker.last_seen.isoformat(timespec="seconds"),
            }
            for worker in record.workers
            if worker.alive
        ],
        "trials_per_hour": rate,
        "estimated_end": end,
    }


def _busy_seconds(trials: Iterable[TrialRecord]) -> float:
    """Seconds in which at least one of these trials was running: pauses of a study do not count."""
    from hpo.report.tables import trial_seconds

    ends = [(trial.ended.timestamp(), trial_seconds(trial) or 0.0) for trial in trials if trial.ended]
    busy, until = 0.0, 0.0
    for begin, end in sorted((end - seconds, end) for end, seconds in ends):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy
