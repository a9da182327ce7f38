"""The time to stop before a job's end, and the watchdog of a hanging trial."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpo.study.running import stopping as pace_module
from hpo.study.running.stopping import Pace, Stop

HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pace_module.time, "monotonic", lambda: now[0])
    return now


def pace_of(stop: Stop) -> Pace:
    return Pace(stop, HOUR, lambda: False)


def test_time_to_leave_is_a_step_and_a_checkpoint(clock: list[float]) -> None:
    stop = Stop(time.time() + HOUR)
    pace, before = pace_of(stop), stop.seconds_left
    with pace.trial():
        clock[0] += 500  # setting up is no step
        for seconds, checkpoint, expected in ((0, 0, 0), (20, 0, 20), (5, 0, 20), (5, 7, 27), (30, 6, 36)):
            clock[0] += seconds
            pace.note_step(checkpoint)
            assert before - stop.seconds_left == pytest.approx(expected, abs=5)
    with pace.trial():
        pace.note_step(6)
        assert before - stop.seconds_left == pytest.approx(6, abs=5), "the next trial has other steps"


def test_limit_is_20_times_the_slowest_step(clock: list[float]) -> None:
    pace = Pace(Stop(), 10.0, lambda: False)
    with pace.trial():
        assert pace.limit_seconds == 10
        for seconds in (3, 7, 2):
            clock[0] += seconds
            pace.note_step(0)
        assert pace.limit_seconds == 140
        with pace.reporting():
            clock[0] += 500
        pace.note_step(0)
        assert pace.limit_seconds == 140, "waiting for the database is no step"


def hang(seconds: float, waits: bool) -> None:
    pace_module._POLL_SECONDS = 0.01
    with Pace(Stop(), 0.1, lambda: waits).trial():
        time.sleep(seconds)


def test_hanging_trial_ends_its_process_with_a_traceback() -> None:
    code = "import test_pace; test_pace.hang(600, False)"
    paths = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}; "
    found = subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=False)
    assert found.returncode == -signal.SIGABRT
    assert "made no step for 0 s: this process ends" in found.stderr
    assert "in hang" in found.stderr


def test_waiting_for_the_database_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(pace_module.os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(pace_module, "_POLL_SECONDS", 0.01)
    hang(1.0, waits=True)
    assert not killed
