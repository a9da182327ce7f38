"""Whether the database answers this process, and since when it does so without a break.

Two things depend on it: what is said of an outage, once when it begins and once when it ends; and who may
call another worker dead. After an outage every worker was silent for as long as it lasted, so the first that
comes back would find all others lapsed. Only who has had the database for a whole lease without a break has
seen that another worker, which could have renewed its lease all that time, did not.
"""

from __future__ import annotations

import logging
import threading
import time

_logger = logging.getLogger(__name__)


class Availability:
    """How the database answers this process. Used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._last = 0.0
        self._away_since: float | None = None

    def note_answer(self, longest_gap: float) -> None:
        """The database has answered.

        What was before a gap longer than `longest_gap` seconds is not known: this process was stopped, or the
        machine slept.
        """
        now = _now()
        with self._lock:
            away_since, self._away_since = self._away_since, None
            if self._since is None or now - self._last > longest_gap:
                self._since = now
            self._last = now
        if away_since is not None:
            _logger.warning("The database is back after %.0f s.", now - away_since)

    def note_outage(self, explanation: str) -> None:
        """The database did not answer."""
        with self._lock:
            begins = self._away_since is None
            if begins:
                self._away_since = _now()
            self._since = None
        if begins:
            _logger.warning("The database is away; what is to be written waits for it. (%s)", explanation)

    def unbroken_seconds(self, longest_gap: float) -> float:
        """How long it has answered without a break, and without a `longest_gap` in which nobody asked."""
        with self._lock:
            now = _now()
            return 0.0 if self._since is None or now - self._last > longest_gap else now - self._since


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps
