"""Availability of the database, and silence of the workers in it.

A worker's heartbeat changes its row. Clocks of machines differ and can be set, so no two clocks are compared:
a worker is silent while its row does not change, by the monotonic clock of the watching process. Time without
access to the database does not count. After an outage, all workers were silent throughout it, and the first
worker to return must not take over the trials of all others.
"""

from __future__ import annotations

import logging
import math
import time

_logger = logging.getLogger(__name__)


class Availability:
    def __init__(self) -> None:
        self._last_answer = -math.inf
        self._away_since: float | None = None
        self._watched: dict[str, tuple[object, float]] = {}

    @property
    def is_away(self) -> bool:
        """True if the last call got no answer."""
        return self._away_since is not None

    def note_answer(self, longest_gap: float) -> None:
        """Note an answer of the database. After more than `longest_gap` seconds, silence is unknown."""
        self._forget_after_gap(longest_gap)
        self._last_answer = time.monotonic()
        if self._away_since is not None:
            _logger.warning("The database is back after %.0f s.", self._last_answer - self._away_since)
            self._away_since = None

    def note_outage(self, explanation: str) -> None:
        self._watched.clear()
        if self._away_since is None:
            self._away_since = time.monotonic()
            _logger.warning("The database is away; waiting for it. (%s)", explanation)

    def silent_seconds(self, worker: str, heartbeat: object, longest_gap: float) -> float:
        """Return how long this process has seen the same heartbeat of a worker without a break.

        A break is an outage, or a `longest_gap` without a call of this process.
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
