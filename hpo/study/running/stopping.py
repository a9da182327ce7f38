"""The stop of a process, and a watchdog over its trials.

Launchers warn with SIGINT, SIGTERM, SIGUSR1 or SIGUSR2, often with one after the other, so each asks for a
checkpoint. Only a second SIGINT, from a person, ends the process at once, or the first while no trial runs
yet. A process with a known end of its job stops by itself, `MARGIN_SECONDS` and the time of a checkpoint
(`Stop.reserve`) before.

A signal handler of Python runs between any two instructions of the main thread, and that thread may hold the
lock of the event. So the handler puts the signal into a queue, and another thread sets the event.

A step that never ends (a deadlock in a kernel, a network file system that does not answer) holds its thread
for ever, while the heartbeat goes on in another. So a thread here ends the process when a trial shows no
progress for `stall_seconds` and `TIMES_SLOWEST` times its longest step. SIGABRT counts as a death
(`hpo.study.claims.leases`): a supervisor starts the worker again.
"""

import faulthandler
import logging
import math
import os
import queue
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from hpo.errors import InputError
from hpo.outcome import Outcome

WORKERS_ON_DEVICE = "HPO_WORKERS_ON_DEVICE"
"""Environment variable of the processes of `run_workers`: the number of them on this one's device."""

MARGIN_SECONDS = 60.0  # time to leave before the end of a job, besides the checkpoint

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

SLURM_END = "SLURM_JOB_END_TIME"

_LONGEST_WAIT = 60.0  # seconds between two readings of the clock; somebody may set it meanwhile

_logger = logging.getLogger(__name__)

Ended = Literal["finished", "stopped", "timeout", "elsewhere", "closed"]

TIMES_SLOWEST = 20
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class RunSummary:
    """The result of one run."""

    ended: Ended
    """Every trial has ended; told to stop; out of time; the rest is for other devices; the study was paused,
    cancelled or deleted."""
    outcomes: Mapping[str, int] = field(default_factory=Counter)
    """Number of trials with an end or a pause here, by last outcome. Empty for a study finished before."""
    elsewhere: tuple[str, ...] = ()
    """Needs of the remaining trials if `ended` is "elsewhere": precisions, or the name of a device."""

    @property
    def num_failed(self) -> int:
        return self.outcomes.get(Outcome.FAILED, 0) + self.outcomes.get(Outcome.CRASHED, 0)

    @property
    def exit_code(self) -> int:
        """130 after a stop; 1 if more than half of the trials failed: a fault of the study."""
        mostly_failed = 2 * self.num_failed > sum(self.outcomes.values())
        return 130 if self.ended == "stopped" else int(mostly_failed)


class Stop(threading.Event):
    """Set when this process is to checkpoint and leave, with the reason.

    `until` is the end of its job, in seconds since 1970. No trial begins after `timeout` seconds.
    """

    def __init__(self, until: float | None = None, timeout: float | None = None) -> None:
        super().__init__()
        self.until = until
        self.reason = ""
        self.signal: signal.Signals | None = None  # the signal; None: the time, or the parent process
        self.deadline = time.monotonic() + (timeout or math.inf)
        """No trial begins after this, by the monotonic clock."""
        self.can_checkpoint = False
        """True once trials may run. Before, the first SIGINT ends the process: there is nothing to keep."""
        self._out_of_time = False
        self._first = threading.Lock()
        self._wakeups: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        available = math.inf if until is None else max(0.0, until - time.time())
        self._margin = min(MARGIN_SECONDS, available / 10)
        self._reserved = 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until this process has to leave; infinite without an end of its job."""
        return math.inf if self.until is None else self.until - self._margin - self._reserved - time.time()

    @property
    def asks_for_requeue(self) -> bool:
        """True at the end of the job's time, or at a warning: the job asks its scheduler to run it again."""
        return self._out_of_time or self.signal in (signal.SIGUSR1, signal.SIGUSR2)

    def set(
        self, reason: str = "", number: signal.Signals | None = None, *, out_of_time: bool = False
    ) -> None:
        """Ask this process to stop. The first reason stays."""
        with self._first:
            if self.is_set():
                return
            self.reason, self.signal, self._out_of_time = reason, number, out_of_time
            super().set()
        if reason:
            _logger.info("Told to stop: %s.", reason)
        if number == signal.SIGINT:
            _logger.info("Stopping after a checkpoint. Ctrl-C again ends at once, without it.")

    def set_out_of_time(self) -> None:
        """Ask this process to stop because its job ends."""
        assert self.until is not None
        end = datetime.fromtimestamp(self.until).astimezone()
        self.set(f"its job ends at {end:%Y-%m-%d %H:%M:%S %Z}", out_of_time=True)

    def reserve(self, seconds: float) -> None:
        """Leave so much earlier than the margin before the end of the job, from now on."""
        if self.until is not None and seconds != self._reserved:
            self._reserved = seconds
            self._wakeups.put(None)

    def _watch(self, leaving: threading.Event) -> None:
        while not leaving.is_set():
            wait = math.inf if self.is_set() else self.seconds_left
            try:
                number = self._wakeups.get(timeout=min(_LONGEST_WAIT, max(0.0, wait)))
            except queue.Empty:
                if self.seconds_left <= 0:
                    self.set_out_of_time()
                continue
            if number is not None:
                self.set(number.name, number)


@contextmanager
def stop_on_signals(until: float | None = None, timeout: float | None = None) -> Iterator[Stop]:
    """Set the `Stop` at the first of `STOP_SIGNALS`, or in time before `until`.

    A second SIGINT, or the first while there is nothing to checkpoint, raises KeyboardInterrupt. A process of
    `run_workers` also stops when its parent asks it to, or dies.
    """
    stop, leaving = Stop(until, timeout), threading.Event()
    interrupts = 0

    def handle(number: int, _frame: object) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if number == signal.SIGINT and (interrupts > 1 or not stop.can_checkpoint):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        stop._wakeups.put(signal.Signals(number))

    watcher = threading.Thread(target=stop._watch, args=[leaving], name="stop", daemon=True)
    watcher.start()
    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    if WORKERS_ON_DEVICE in os.environ:
        stop_at_end_of_input(stop, "the process that started this worker wants it to, or has ended")
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        leaving.set()
        stop._wakeups.put(None)
        watcher.join()


def stop_at_end_of_input(stop: Stop, reason: str) -> None:
    """Set the `Stop` when the standard input ends, also by the death of the process at its other end."""

    def wait() -> None:
        # Not `sys.stdin`: its lock, held here at exit, would abort the interpreter.
        while os.read(0, 1):
            pass
        stop.set(reason)

    threading.Thread(target=wait, daemon=True).start()


def end_of_job(until: str | None, environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the earlier of `until` (see `parse_time`) and Slurm's end of the job; None: neither is given."""
    ends = [] if until is None else [parse_time(until)]
    if slurm_end := environment.get(SLURM_END):
        if not slurm_end.isdecimal():
            raise InputError(f"{SLURM_END} must be a number of seconds since 1970, but got {slurm_end!r}.")
        ends.append(float(slurm_end))
    return min(ends, default=None)


def parse_time(text: str) -> float:
    """Return a future time, given as `18:30`, `2026-11-22T18:30` or `+3600` (seconds). Raises InputError."""
    now = datetime.now().astimezone()
    try:
        if text.startswith("+"):
            end = now + timedelta(seconds=int(text))
        elif "T" in text:
            end = datetime.fromisoformat(text).astimezone()
        else:
            clock = datetime.strptime(text, "%H:%M").time()
            day = now.date() + timedelta(days=clock <= now.time())
            end = datetime.combine(day, clock).astimezone()  # another offset than today's after a DST change
    except (ValueError, OverflowError):
        raise InputError(
            f"--until must be a time of day (18:30), a date and time (2026-11-22T18:30) or seconds from now "
            f"(+3600), but got {text!r}."
        ) from None
    if end <= now:
        raise InputError(f"--until must lie ahead, but got {text}, and it is {now:%Y-%m-%dT%H:%M} here.")
    return end.timestamp()


class Pace:
    """Notes signs of progress of this process's trials; ends the process after `stall_seconds` without
    any.
    """

    def __init__(self, stop: Stop, stall_seconds: float, is_waiting: Callable[[], bool]) -> None:
        self._stop = stop
        self._stall_seconds = stall_seconds
        self._is_waiting = is_waiting
        self._between_signs = 0.0  # the longest
        self._sign_at = 0.0
        self._longest_step: float | None = None

    @contextmanager
    def trial(self) -> Iterator[None]:
        self._sign_at = time.monotonic()
        self._longest_step = None
        over = threading.Event()
        watchdog = threading.Thread(target=self._watch, args=[over], name="watchdog", daemon=True)
        watchdog.start()
        try:
            yield
        finally:
            over.set()
            watchdog.join()

    def note_step(self, checkpoint_seconds: float) -> None:
        """Note the end of a step: leave time before the job's end for the longest step and a checkpoint."""
        seconds = self._note_sign()
        # The time before the first step is that of the setup.
        self._longest_step = 0.0 if self._longest_step is None else max(self._longest_step, seconds)
        self._stop.reserve(self._longest_step + checkpoint_seconds)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Note an evaluation of the trial. Its report in the block counts as progress."""
        self._note_sign()
        yield
        self._sign_at = time.monotonic()

    @property
    def limit_seconds(self) -> float:
        """Longest time without a sign of progress."""
        return max(self._stall_seconds, TIMES_SLOWEST * self._between_signs)

    def _note_sign(self) -> float:
        now = time.monotonic()
        seconds, self._sign_at = now - self._sign_at, now
        self._between_signs = max(self._between_signs, seconds)
        return seconds

    def _watch(self, over: threading.Event) -> None:
        # Counted in polls: a stopped process, or one on a sleeping machine, had no time to go on.
        seconds, last = 0.0, self._sign_at
        while not over.wait(_POLL_SECONDS):
            if self._sign_at != last or self._is_waiting():
                seconds, last = 0.0, self._sign_at
            else:
                seconds += _POLL_SECONDS
            if seconds > self.limit_seconds:
                _logger.error(
                    "The trial has made no step for %.0f s: this process ends, and the trial goes on from "
                    "its last checkpoint. Its threads:",
                    seconds,
                )
                faulthandler.dump_traceback(all_threads=True)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # as large as the model
                os.kill(os.getpid(), signal.SIGABRT)
