"""Signals, the end of a job with the time to leave before it, and the watchdog of a hanging trial."""

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hpo.errors import InputError
from hpo.study.running import stopping as stopping_module
from hpo.study.running.stopping import STOP_SIGNALS, Pace, Stop, end_of_job, parse_time, stop_on_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_sets_the_stop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        stop.can_checkpoint = True
        assert (stop.reason, stop.signal, stop.asks_for_requeue) == ("", None, False)
        signal.raise_signal(number)
        assert stop.wait(60)
        assert (stop.reason, stop.signal) == (number.name, number)
        assert stop.asks_for_requeue == (number in (signal.SIGUSR1, signal.SIGUSR2))
    assert signal.getsignal(number) is before


def test_only_a_second_interrupt_ends_at_once() -> None:
    with stop_on_signals() as stop:
        stop.can_checkpoint = True
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.raise_signal(number)
        assert stop.wait(60)
        assert (stop.reason, stop.asks_for_requeue) == ("SIGUSR1", True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_signals_during_a_wait_do_not_block() -> None:
    with stop_on_signals() as stop:
        script = "import os, sys, time\nfor _ in range(300): os.kill(int(sys.argv[1]), 10); time.sleep(1e-3)"
        sender = subprocess.Popen([sys.executable, "-c", script, str(os.getpid())])
        while sender.poll() is None:
            stop.wait(1e-4)
            stop.clear()
        assert sender.returncode == 0


def test_stop_before_the_end_of_the_job() -> None:
    end = time.time() + 1.0
    with stop_on_signals(end) as stop:
        assert stop.wait(60)
        assert time.time() < end
        assert (stop.signal, stop.asks_for_requeue) == (None, True)
        assert stop.reason.startswith("its job ends at 20")


def test_reserved_time_moves_the_stop_forward() -> None:
    with stop_on_signals(time.time() + 3600) as stop:
        assert 3500 < stop.seconds_left <= 3540
        stop.reserve(1000)
        assert 2500 < stop.seconds_left < 2540
        stop.reserve(3600)
        assert stop.wait(60)
        assert stop.asks_for_requeue
        stop.set("SIGTERM", signal.SIGTERM)
        assert stop.signal is None, "the first reason stays"
    with stop_on_signals(time.time() + 100) as stop:
        assert 85 < stop.seconds_left <= 90


def test_forms_of_a_time() -> None:
    now = datetime.now().astimezone()
    later = (now + timedelta(hours=2)).replace(second=0, microsecond=0)
    assert parse_time(later.strftime("%H:%M")) == later.timestamp()
    assert parse_time(later.strftime("%Y-%m-%dT%H:%M")) == later.timestamp()
    assert parse_time(later.isoformat()) == later.timestamp()
    earlier = (now - timedelta(hours=2)).replace(second=0, microsecond=0)
    tomorrow = earlier + timedelta(days=1)
    assert parse_time(earlier.strftime("%H:%M")) == tomorrow.timestamp()
    assert abs(parse_time("+3600") - time.time() - 3600) < 60


def test_a_time_of_day_after_the_clocks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Berlin the clocks go forward at 2:00 of 29 March 2026."""

    class Evening(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(datetime(2026, 3, 28, 22, tzinfo=UTC).timestamp(), tz)

    monkeypatch.setattr(stopping_module, "datetime", Evening)
    with monkeypatch.context() as berlin:
        berlin.setenv("TZ", "Europe/Berlin")
        time.tzset()
        end = parse_time("08:00")
    time.tzset()
    assert end == datetime(2026, 3, 29, 6, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("text", ["", "25:00", "+1h", "+-5", "2026-13-01T10:00", "+99999999999999"])
def test_invalid_time(text: str) -> None:
    with pytest.raises(InputError, match=r"--until must be a time of day \(18:30\), .* but got") as raised:
        parse_time(text)
    assert repr(text) in str(raised.value)


def test_earlier_end_counts() -> None:
    assert end_of_job(None, {}) is None
    assert end_of_job(None, {"SLURM_JOB_END_TIME": "12"}) == 12
    in_an_hour = parse_time("+3600")
    assert end_of_job("+60", {"SLURM_JOB_END_TIME": str(int(in_an_hour))}) < in_an_hour - 3000
    with pytest.raises(InputError, match=r"SLURM_JOB_END_TIME must be a number of seconds .* 'NONE'"):
        end_of_job(None, {"SLURM_JOB_END_TIME": "NONE"})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(stopping_module.time, "monotonic", lambda: now[0])
    return now


def test_time_to_leave_is_a_step_and_a_checkpoint(clock: list[float]) -> None:
    stop = Stop(time.time() + 3600.0)
    pace, before = Pace(stop, 3600.0, lambda: False), stop.seconds_left
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
    stopping_module._POLL_SECONDS = 0.01
    with Pace(Stop(), 0.1, lambda: waits).trial():
        time.sleep(seconds)


def test_hanging_trial_ends_its_process_with_a_traceback() -> None:
    code = "import test_stopping; test_stopping.hang(600, False)"
    paths = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}; "
    found = subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=False)
    assert found.returncode == -signal.SIGABRT
    assert "made no step for 0 s: this process ends" in found.stderr
    assert "in hang" in found.stderr


def test_waiting_for_the_database_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(stopping_module.os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(stopping_module, "_POLL_SECONDS", 0.01)
    hang(1.0, waits=True)
    assert not killed
