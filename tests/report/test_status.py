from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.study_records import fake_trial, record_of

from hpo.report import screens
from hpo.report.status import study_status
from hpo.study.reading.study_record import StudyRecord, WorkerRecord


def at(number: int, begin: float, end: float) -> Any:
    times = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute) for minute in (begin, end)]
    return replace(fake_trial(number, "fp32"), started=times[0], ended=times[1], seconds=60 * (end - begin))


def left(begin: float, end: float) -> WorkerRecord:
    of_trial = at(0, begin, end)
    return WorkerRecord(
        "node1-6", "node1", 6, of_trial.started, of_trial.ended, alive=False, trial_number=None
    )


def record(*trials: Any, **changes: Any) -> StudyRecord:
    """Record with three trials left, one of them with a live worker.

    Two earlier workers ran at once, then there was a night, and then a third one ran.
    """
    counts = {"open": 2, "running": 1, "done": len(trials)}
    now = datetime.now(UTC)
    earlier = [left(0, 8), left(2, 10), left(600, 605)]
    live = WorkerRecord("node1-7-abc", "node1", 7, now, now, alive=True, trial_number=3)
    return record_of(list(trials), **{"counts": counts, "workers": [*earlier, live], **changes})


def test_rate_omits_the_time_without_a_worker() -> None:
    """One worker needs 7 minutes for each trial."""
    status = study_status(record(at(0, 0, 8), at(1, 2, 10), at(2, 600, 605)))
    assert status["trials_per_hour"] == pytest.approx(12)
    end = datetime.fromisoformat(status["estimated_end"])
    assert end - datetime.now(UTC) == pytest.approx(timedelta(minutes=21), abs=timedelta(seconds=30))
    assert status["workers"][0]["trial"] == 3


def test_rate_omits_trials_without_training() -> None:
    untrained = {"outcome": "failed", "values": None, "evaluations": []}
    failed = [replace(at(number, 0, 0.001), **untrained) for number in range(2, 9)]
    assert study_status(record(at(0, 0, 10), *failed))["trials_per_hour"] == pytest.approx(4)
    assert study_status(record(*failed))["trials_per_hour"] is None


def test_rate_counts_the_time_of_paused_trials() -> None:
    """At the end of a study all of its paused trials end in one second, each with the time of its starts."""
    ended = [replace(at(number, 0, 605), attributes={"active_seconds": 120.0}) for number in range(5)]
    assert study_status(record(*ended))["trials_per_hour"] == pytest.approx(20)


def test_no_estimate_without_a_live_worker_or_an_ended_trial() -> None:
    assert study_status(record(at(0, 0, 8), workers=[]))["estimated_end"] is None
    status = study_status(record())
    assert (status["trials_per_hour"], status["estimated_end"], status["best"]) == (None, None, [])


def test_time_by_precision_omits_invalid_trials() -> None:
    trials = [fake_trial(0, "fp32"), fake_trial(1, "bf16"), fake_trial(2, "bf16", "invalid")]
    trials.append(replace(fake_trial(3, "fp32", "running"), params={}, telemetry={}))
    spent = {0: 3600.0, 1: 3600.0, 2: 7200.0, 3: 1800.0}
    budget = study_status(record(*trials, definition={"budget": {"hours": 9.0}}, spent=spent))["budget"]
    assert budget["by_precision"] == {"fp32": 1.0, "bf16": 1.0, "not known yet": 0.5}
    assert budget["by_outcome"] == {"complete": 2.0, "invalid": 2.0, "running": 0.5}
    assert (budget["spent_hours"], budget["left_hours"]) == (4.5, 4.5)


def test_paused_trials_have_their_step_and_values_at_the_last_rung() -> None:
    rungs = {"0.36": {"values": [0.625], "constraints": {}}, "0.1": {"values": [0.5], "constraints": {}}}
    paused = replace(
        fake_trial(4, "fp32"), outcome="paused", state="RUNNING", ended=None, attributes={"rungs": rungs}
    )
    shown = record(at(0, 0, 8), paused)
    status = study_status(shown)
    step = max(one.step for one in paused.evaluations)
    assert status["paused"] == [{"number": 4, "rung": 0.36, "step": step, "values": {"score": 0.625}}]
    tables = [part[1] for part in screens.status(shown, status) if isinstance(part, tuple)]
    row = {"paused trial": "4", "at step": str(step), "of its training": "36%", "score": "0.625"}
    assert [row] in tables
