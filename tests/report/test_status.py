from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.study_records import fake_trial, record_of

from hpo.report.caveats import caveats
from hpo.report.dashboard import study_note
from hpo.report.status import paused_told, study_status
from hpo.report.tables import StudyTables
from hpo.study.reading.study_record import StudyRecord, WorkerRecord


def at(number: int, begin: float, end: float) -> Any:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    times = (start + timedelta(minutes=begin), start + timedelta(minutes=end))
    return replace(fake_trial(number, "fp32"), started=times[0], ended=times[1], seconds=60 * (end - begin))


def record(*trials: Any, **changes: Any) -> StudyRecord:
    """Three trials are left, one of them with a live worker."""
    counts = {"open": 2, "running": 1, "done": len(trials)}
    live = WorkerRecord("node1-7-abc", "node1", 7, datetime.now(UTC), alive=True, trial_number=3)
    return record_of(list(trials), **{"counts": counts, "workers": [live], **changes})


def test_rate_counts_the_time_in_which_the_study_was_worked_on() -> None:
    """Two trials run at once, then there is a night, then one runs. One worker needs 7 minutes for each."""
    status = study_status(record(at(0, 0, 8), at(1, 2, 10), at(2, 600, 605)))
    assert status["trials_per_hour"] == pytest.approx(12)
    end = datetime.fromisoformat(status["estimated_end"])
    assert end - datetime.now(UTC) == pytest.approx(timedelta(minutes=21), abs=timedelta(seconds=30))
    assert status["workers"][0]["trial"] == 3


def test_the_time_of_an_invalid_trial_is_spent_on_no_precision() -> None:
    trials = [fake_trial(0, "fp32"), fake_trial(1, "bf16"), fake_trial(2, "bf16", "invalid")]
    given = record(*trials, definition={"budget": {"hours": 9.0}}, spent={0: 3600.0, 1: 3600.0, 2: 7200.0})
    budget = study_status(given)["budget"]
    assert budget["by_precision"] == {"fp32": 1.0, "bf16": 1.0}
    assert budget["by_outcome"] == {"complete": 2.0, "invalid": 2.0}
    assert budget["spent_hours"] == 4.0


def test_no_estimate_without_a_live_worker_or_an_ended_trial() -> None:
    assert study_status(record(at(0, 0, 8), workers=[]))["estimated_end"] is None
    status = study_status(record())
    assert (status["trials_per_hour"], status["estimated_end"], status["best"]) == (None, None, [])


def test_rate_counts_what_trained() -> None:
    """Trials that fail at once do not make a study fast."""
    ended = {"outcome": "failed", "values": None, "evaluations": []}
    failed = [replace(at(number, 0, 0.001), **ended) for number in range(2, 9)]
    status = study_status(record(at(0, 0, 10), at(1, 10, 20), *failed))
    assert status["trials_per_hour"] == pytest.approx(6)
    assert study_status(record(*failed))["trials_per_hour"] is None


def unverified(number: int) -> Any:
    trial = at(number, 0, 8)
    trial.telemetry["precision"] |= {"agrees": None, "reason": "No product was seen to use TF32."}
    return trial


def test_unverified_trials_are_counted_with_the_reason() -> None:
    told = "The precision of 2 trials (number 0, 2) is unverified: No product was seen to use TF32. "
    found = record(unverified(0), at(1, 0, 8), unverified(2))
    (warning,) = study_status(found)["warnings"]
    assert warning.startswith(told)
    tables = StudyTables(found)
    assert tables.trials["counts"].all()
    assert next(" ".join(notice) for notice in caveats(tables)) == warning
    assert warning in study_note(tables)
    assert study_status(record(at(1, 0, 8)))["warnings"] == []


@pytest.mark.parametrize(("factor", "share"), [(2, "half"), (3, "third"), (4, "quarter"), (5, "1 in 5")])
def test_paused_trials_are_named_with_the_condition_of_the_study(factor: int, share: str) -> None:
    pruner = {"name": "promote", "reduction_factor": factor}
    counts = {"open": 1, "running": 0, "done": 2, "paused": 4}
    told = paused_told(record_of([], counts=counts, definition={"pruner": pruner}))
    assert told == (
        f"Trials that are paused: 4. One continues if it is among the best {share} of those that trained as "
        "long. When no trial is left to start, more of them continue."
    )


def test_nothing_is_said_where_no_trial_is_paused() -> None:
    assert paused_told(record()) == ""


def test_the_status_of_a_study_that_promotes_imports_no_slow_module() -> None:
    """Its planner asks the rungs, whose trials NumPy sorts only if there are several objectives."""
    study = {"pruner": {"name": "promote"}}
    code = (
        "import sys\nfrom hpo.report.status import study_status\n"
        "from hpo.study.reading.study_record import StudyRecord\n"
        "counts = {'open': 4, 'running': 0, 'done': 0}\n"
        f"study_status(StudyRecord('s', ('score',), ('maximize',), {study}, [], [], counts))\n"
        "print([name for name in ('pandas', 'torch', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
