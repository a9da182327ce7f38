"""Says on the logger `hpo.data` what is read or tokenised, so that nobody waits in silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

LOG_SECONDS = 10.0

logger = logging.getLogger("hpo.data")
_T = TypeVar("_T")


def logged(
    items: Iterable[_T],
    what: str,
    total: int | None = None,
    size: Callable[[_T], int] = lambda _: 1,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[_T]:
    """Pass items on; log (INFO) what is done at once, and how far it is about every ten seconds of work.

    An item counts as `size` of the `total`, where that is known; `clock` gives seconds.
    """
    logger.info("%s", what)
    num_done, last = 0, clock()
    for item in items:
        yield item
        num_done += size(item)
        if (now := clock()) - last >= LOG_SECONDS:
            last = now
            share = f"{100 * num_done // total} % of {total:,}" if total else f"{num_done:,} rows so far"
            logger.info("%s: %s", what, share)
