"""Whether the database answers this process, and since when without a break.

After an outage every worker was silent for as long as it lasted, so the first that comes back would find the
leases of all others lapsed. Only who has had the database for a whole lease without a break has seen that
another worker, which could have renewed its lease all that time, did not.
"""

from __future__ import annotations

import logging
import time

_logger = logging.getLogger(__name__)


class Availability:
    """How the database answers this process."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0
        self._away_since: float | None = None

    @property
    def is_away(self) -> bool:
        """Whether the database did not answer when it was asked last."""
        return self._away_since is not None

    def note_answer(self, longest_gap: float) -> None:
        """The database has answered; what was before more than `longest_gap` seconds is not known."""
        now = _now()
        away_since, self._away_since = self._away_since, None
        if self._since is None or now - self._last > longest_gap:
            self._since = now
        self._last = now
        if away_since is not None:
            _logger.warning("The database is back after %.0f s.", now - away_since)

    def note_outage(self, explanation: str) -> None:
        """The database did not answer."""
        self._since = None
        if self._away_since is None:
            self._away_since = _now()
            _logger.warning("The database is away; waiting for it. (%s)", explanation)

    def unbroken_seconds(self, longest_gap: float) -> float:
        """How long it has answered without a break, and without a `longest_gap` in which nobody asked."""
        now = _now()
        return 0.0 if self._since is None or now - self._last > longest_gap else now - self._since


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps
