"""A wait for a condition. This file imports little, because `conftest.py` needs it."""

import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], bool], seconds: float = 120, check: Callable[[], object] = lambda: None
) -> None:
    """Wait until `condition` holds; `check` raises if it never will."""
    deadline = time.monotonic() + seconds
    while not condition():
        check()
        assert time.monotonic() < deadline
        time.sleep(0.01)
