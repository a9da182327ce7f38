"""A tracker beside a run, in a process of its own, so that it cannot disturb the search. The process ends
after its standard input does, also if this process is killed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpo.config.trackers import TrackerName
from hpo.errors import shorten

LEAVE_SECONDS = 60.0
"""How long a run waits at its end for the tracker to take the rest."""

_logger = logging.getLogger(__name__)


@contextmanager
def tracked(study: str, tracker: TrackerName | None, storage: str, runs_dir: Path) -> Iterator[None]:
    """Show the study of that name in the tracker during the block; what it lacks at the end is said.

    `storage` is where the study lives, as a user would give it.
    """
    if tracker is None:
        yield
        return
    log = runs_dir / study / f"track-{tracker}.log"
    to = ["track", study, "--to", tracker]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpo", *to, "--follow", "--with-parent"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HPO_STORAGE": storage},
            start_new_session=True,  # Ctrl-C in the terminal reaches the run alone
        )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        why = _wait(process, log)
        if why:
            again = "What is missing there comes with"
            _logger.warning("The tracker %s: %s. %s: hpo %s", tracker, why, again, " ".join(to))


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the process to end; why it has not shown everything, or empty."""
    try:
        code = process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"it took longer than {LEAVE_SECONDS:g} s"
    if not code:
        return ""
    return shorten(log.read_text(errors="replace"), 500).rstrip(".") or f"its process ended with {code}"
