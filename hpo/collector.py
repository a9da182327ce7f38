"""A pause of Python's garbage collector. This file imports nothing large: the pause is for such imports."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, for imports of large packages and for reading a study.

    Hardly any of these objects is garbage. The collector takes 1.3 s of the 6.2 s of a trial's imports.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
