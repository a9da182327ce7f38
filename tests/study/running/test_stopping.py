"""Signals, the end of a job, and the time to leave before it."""

from __future__ import annotations

import signal
import time
from datetime import datetime, timedelta

import pytest

from hpo.errors import InputError
from hpo.study.running.stopping import STOP_SIGNALS, end_of_job, parse_time, stop_on_signals


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
