"""Why a process stops, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from worker_process import wait_for

from hpo.errors import InputError
from hpo.study.running.stopping import STOP_SIGNALS, Stop, end_of_job, stop_on_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_stops(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        stop.can_checkpoint = True
        assert (stop.reason, stop.signal, stop.asks_for_requeue) == ("", None, False)
        signal.raise_signal(number)
        assert stop.wait(60)
        assert (stop.reason, stop.signal) == (number.name, number)
        assert stop.asks_for_requeue == (number in (signal.SIGUSR1, signal.SIGUSR2))
    assert signal.getsignal(number) is before


def test_a_launcher_may_warn_and_then_terminate() -> None:
    """Only a second SIGINT ends the process at once, and the reason stays that of the first signal."""
    with stop_on_signals() as stop:
        stop.can_checkpoint = True
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.raise_signal(number)
        assert stop.wait(60)
        assert (stop.reason, stop.asks_for_requeue) == ("SIGUSR1", True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_first_interrupt_ends_a_process_that_has_nothing_to_checkpoint() -> None:
    with stop_on_signals() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not stop.is_set()


def test_signals_that_come_while_the_event_is_in_use_do_not_block_it() -> None:
    """A handler that took the event's own lock would wait for the code that it interrupted."""
    with stop_on_signals() as stop:
        script = "import os, sys, time\nfor _ in range(300): os.kill(int(sys.argv[1]), 10); time.sleep(1e-3)"
        sender = subprocess.Popen([sys.executable, "-c", script, str(os.getpid())])
        while sender.poll() is None:
            stop.wait(1e-4)
            stop.clear()
        assert sender.returncode == 0


def test_it_stops_before_the_end_of_its_job() -> None:
    end = time.time() + 1.0
    with stop_on_signals(end) as stop:
        assert stop.wait(60)
        assert time.time() < end
        assert (stop.signal, stop.asks_for_requeue) == (None, True)
        assert stop.reason.startswith("its job ends at 20")


def test_the_end_of_the_job_moves_with_what_leaving_takes() -> None:
    with stop_on_signals(time.time() + 3600) as stop:
        assert 3500 < stop.seconds_left <= 3540
        stop.reserve(1000)
        assert 2500 < stop.seconds_left < 2540
        assert not stop.is_set()
        stop.reserve(3600)
        assert stop.wait(60)
        assert stop.asks_for_requeue
        stop.set("SIGTERM", signal.SIGTERM)
        assert stop.signal is None, "the first reason stays"
    with stop_on_signals(time.time() + 100) as stop:
        assert 85 < stop.seconds_left <= 90


def test_a_process_without_an_end_has_time() -> None:
    stop = Stop()
    stop.reserve(10)
    assert stop.seconds_left == stop.deadline == float("inf")


def test_slurm_says_when_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_of_job() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "12")
    assert end_of_job() == 12
    monkeypatch.setenv("SLURM_JOB_END_TIME", "NONE")
    with pytest.raises(InputError, match=r"SLURM_JOB_END_TIME must be a number of seconds .* 'NONE'"):
        end_of_job()


def test_a_job_whose_end_has_passed_stops_at_once() -> None:
    with stop_on_signals(12.0) as stop:
        wait_for(stop.is_set)
