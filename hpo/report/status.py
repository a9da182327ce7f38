"""The state of a study in numbers: trials by outcome, workers, rate, estimated end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from hpo.config.sampler_config import PrunerConfig
from hpo.report.outlook import stored_outlook
from hpo.report.spending import spending
from hpo.study.reading.study_record import (
    StudyRecord,
    TrialRecord,
    best_trials,
    limit_counts,
    lost_weights,
    unverified_precisions,
)


def study_status(record: StudyRecord) -> dict[str, Any]:
    """A study's state in numbers: what `hpo status --json` prints. Times are UTC.

    Rate and estimated end are those of trials that trained: one that ends at once says nothing of the others.
    """
    trained = [trial for trial in record.trials if trial.ended and (trial.evaluations or trial.values)]
    hours = _busy_seconds(trained) / 3600
    rate = len(trained) / hours if hours else None
    workers = [worker for worker in record.workers if worker.alive]
    ahead = stored_outlook(record)
    hours_left = ahead.seconds / 3600 / num_shares(record) if ahead.cost and workers else None
    end = datetime.now(UTC) + timedelta(hours=hours_left) if hours_left and workers else None
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
        "budget": spending(record, ahead),
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
        "warnings": [
            *(" ".join(said) for said in (*lost_weights(record), *unverified_precisions(record))),
        ],
        "trials_per_hour": rate,
        "estimated_end": end and end.isoformat(timespec="seconds"),
    }


def num_shares(record: StudyRecord) -> int:
    """Return into how many parts the device time is divided: live workers, or with a budget their devices."""
    live = [worker for worker in record.workers if worker.alive]
    if record.definition.get("budget") is None:
        return len(live)
    return len({(worker.host, worker.device or worker.id) for worker in live})


def paused_told(record: StudyRecord) -> str:
    """Say how many trials are paused, and when they continue; empty if none is paused."""
    paused = record.counts.get("paused", 0)
    factor = PrunerConfig.model_validate(record.definition.get("pruner", {})).options.get("reduction_factor")
    if not paused or not factor:
        return ""
    share = {2: "half", 3: "third", 4: "quarter"}.get(factor, f"1 in {factor}")
    more = "When no trial is left to start, more of them continue."
    return (
        f"Trials that are paused: {paused}. One continues if it is among the best {share} of those that "
        f"trained as long. {more}"
    )


def _busy_seconds(trials: Iterable[TrialRecord]) -> float:
    """Seconds in which at least one of these trials was running: pauses of a study do not count."""
    ends = [(trial.ended.timestamp(), trial.active_seconds or 0.0) for trial in trials if trial.ended]
    busy, until = 0.0, 0.0
    for begin, end in sorted((end - seconds, end) for end, seconds in ends):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy
