from __future__ import annotations

import logging
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from support.study_records import DEFINITION
from tracked_study import TELEMETRY, TrackedStudy

from hpo.study.reading.study_record import StudyRecord, WorkerRecord
from hpo.track import follow
from hpo.track.follow import Follower
from hpo.track.runs import Run, runs_of


class Taken:
    where = "nowhere"

    def __init__(self) -> None:
        self.names: list[str] = []

    def show(self, run: Run, write_files: object = None, /) -> bool:  # noqa: ARG002
        self.names.append(run.name)
        return True

    def close(self) -> None:
        """Nothing is open."""


class Impatient(threading.Event):
    """Set after so many waits, which do not take any time."""

    def __init__(self, waits: int) -> None:
        super().__init__()
        self.waits_left = waits

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        self.waits_left -= 1
        if not self.waits_left:
            self.set()
        return self.is_set()


@pytest.mark.parametrize("has_worker", [False, True])
def test_a_study_in_which_no_worker_is_any_more(
    tracked: TrackedStudy, caplog: pytest.LogCaptureFixture, has_worker: bool
) -> None:
    """With trials left: of a grid, for devices that there are not; or the time of the run was over."""
    tracked.run("complete")
    if has_worker:
        tracked.leave_running(alive=True)
    tracker, stop = Taken(), Impatient(3)
    follower = Follower(lambda: tracked.record, tracked.storage.study_token(tracked.name), tracker)
    with caplog.at_level(logging.WARNING):
        shown = follower.follow(stop, 1e-9 if not has_worker else follow.IDLE_SECONDS)
    assert not shown.is_over
    assert "trial 0" in tracker.names
    assert stop.is_set() is has_worker
    assert ("No worker was in the study" in caplog.text) is not has_worker


def test_idle_seconds_count_from_the_last_heartbeat_by_the_clock_of_the_follower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody sets the database's clock by a day; one worker is alive until then, and nobody after."""
    now, day = [0.0], timedelta(days=1)
    monkeypatch.setattr(follow.time, "monotonic", lambda: now[0])
    seen = datetime(2026, 1, 1, tzinfo=UTC)
    looks = iter([seen, seen, seen + day, seen + day])

    def read() -> StudyRecord:
        worker = WorkerRecord("w", "node", 7, next(looks), alive=False, trial_number=None)
        worker = replace(worker, silent_seconds=day.total_seconds())
        counts = {"open": 1, "running": 0, "done": 0}
        return StudyRecord("fake", ("score",), ("maximize",), DEFINITION, [], [worker], counts)

    follower, idle = Follower(read, "token", Taken()), []
    for _ in range(4):
        idle.append(follower.look().idle_seconds)
        now[0] += 10.0
    assert idle == [0.0, 10.0, 0.0, 10.0]


def test_in_what_weights_and_optimizer_states_are_stored(tracked: TrackedStudy) -> None:
    base = {"requested": "nf4", "effective": "nf4", "reason": "", "agrees": True}
    base["observed"] = {"storage_dtypes": {"uint8": 12}}
    kept = {"requested": "int8", "effective": "fp32", "reason": "no matrix is large enough.", "bytes": 4}
    kept["dtypes"] = {"float32": 90}
    tracked.run("complete", telemetry=TELEMETRY | {"base_precision": base, "optimizer_state": kept})
    tracked.run("complete", telemetry=TELEMETRY | {"optimizer_state": kept | {"requested": "fp32"}})
    stored, default = (run.facts for run in runs_of(tracked.record, "token"))
    names = ("base_precision", "optimizer_state")
    assert {name: value for name, value in stored.items() if name.startswith(names)} == {
        "base_precision_requested": "nf4",
        "base_precision_effective": "nf4",
        "base_precision_observed": '{"storage_dtypes": {"uint8": 12}}',
        "base_precision_agrees": "true",
        "optimizer_state_requested": "int8",
        "optimizer_state_effective": "fp32",
        "optimizer_state_observed": '{"float32": 90}',
        "optimizer_state_reason": "no matrix is large enough.",
    }
    assert {name for name in default if name.startswith("base_precision")} == set()
    assert default["optimizer_state_effective"] == "fp32"
