"""The pace of this process's trials: the time to stop before the end of its job, and a watchdog.

A step that never ends (a deadlock in a kernel, a network file system that does not answer) holds its thread
for ever, while the heartbeat goes on in another. So a thread here ends the process when a trial shows no
progress for `stall_seconds` and `TIMES_SLOWEST` times its longest step. SIGABRT counts as a death
(`hpo.study.claims.leases`): a supervisor starts the worker again, and the trial goes on from its checkpoint.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpo.study.running.stopping import Stop

TIMES_SLOWEST = 20
_POLL_SECONDS = 1.0

_logger = logging.getLogger(__name__)


class Pace:
    """Notes each step and evaluation of this process's trials.

    The process ends after `stall_seconds` without progress, unless it `is_waiting` for the database.
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
        """Note the end of a step: leave time before the job's end for the longest step and a checkpoint.

        Evaluations lie between two steps, so a step may take as long as one.
        """
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
