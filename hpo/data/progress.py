"""Says on the logger `hpo.data` what is read or tokenised, so that nobody waits in silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG_SECONDS = 10.0

_logger = logging.getLogger("hpo.data")


class ProgressLog:
    """Logs (INFO) what is done at once, and how far it is about every ten seconds of work.

    `total` is the number of items, where it is known; `clock` gives seconds.
    """

    def __init__(
        self, what: str, total: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._total = total
        self._clock = clock
        self._num_done = 0
        self._last = clock()
        _logger.info("%s", what)

    def advance(self, num_items: int = 1) -> None:
        """Count items that are done."""
        self._num_done += num_items
        now = self._clock()
        if now - self._last >= LOG_SECONDS:
            self._last = now
            how_far = (
                f"{100 * self._num_done // self._total} % of {self._total:,}"
                if self._total
                else f"{self._num_done:,} rows so far"
            )
            _logger.info("%s: %s", self._what, how_far)
