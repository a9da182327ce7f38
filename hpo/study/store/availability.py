"""Whether the database answers this process, and which workers are silent in it.

A worker's heartbeat changes its row. The clocks of machines differ, and somebody may set one, so no two
clocks are compared: a worker is silent for as long as its row does not change, by the monotonic clock of the
process that watches. Time in which the watching process could not read the database does not count. After an
outage every worker was silent for as long as it lasted, and the first that comes back must not take over the
trials of all others.
"""

from __future__ import annotations

import logging
import math
import time

_logger = logging.getLogger(__name__)


class Availability:
    """How the database answers this process."""

    def __init__(self) -> None:
        self._last_answer = -math.inf
        self._away_since: float | None = None
        self._watched: dict[str, tuple[object, float]] = {}

    @property
    def is_away(self) -> bool:
        """Whether the database did not answer when it was asked last."""
        return self._away_since is not None

    def note_answer(self, longest_gap: float) -> None:
        """The database has answered; what was before more than `longest_gap` seconds is not known."""
        self._forget_after_gap(longest_gap)
        self._last_answer = time.monotonic()
        if self._away_since is not None:
            _logger.warning("The database is back after %.0f s.", self._last_answer - self._away_since)
            self._away_since = None

    def note_outage(self, explanation: str) -> None:
        """The database did not answer."""
        self._watched.clear()
        if self._away_since is None:
            self._away_since = time.monotonic()
            _logger.warning("The database is away; waiting for it. (%s)", explanation)

    def silent_seconds(self, worker: str, heartbeat: object, longest_gap: float) -> float:
        """Return how long this process has seen the same heartbeat of a worker, without a break.

        It is 0 when a heartbeat is seen for the first time. A break is an outage, or a `longest_gap` in which
        this process did not ask the database.
        """
        self._forget_after_gap(longest_gap)
        now = time.monotonic()
        last, since = self._watched.get(worker, (None, now))
        if last != heartbeat:
            since = now
        self._watched[worker] = (heartbeat, since)
        return now - since

    def _forget_after_gap(self, longest_gap: float) -> None:
        if time.monotonic() - self._last_answer > longest_gap:
            self._watched.clear()
