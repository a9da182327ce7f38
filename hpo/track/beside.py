"""A tracker beside a run, in a process of its own, so that it cannot disturb the search. The process ends
after its standard input does, also if this process is killed. It writes only what the user must know.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO

from hpo.config.trackers import TrackerName
from hpo.errors import shorten

LEAVE_SECONDS = 120.0
"""How long a run waits at its end for the tracker to take the rest and the report."""

_logger = logging.getLogger(__name__)


@contextmanager
def tracked(study: str, tracker: TrackerName | None, storage: str, runs_dir: Path) -> Iterator[None]:
    """Show the study of that name in the tracker during the block, and tell what the tracker says.

    `storage` is the place of the study, as a user gives it.
    """
    if tracker is None:
        yield
        return
    to = ["track", study, "--to", tracker]
    process = subprocess.Popen(
        [sys.executable, "-m", "hpo", *to, "--follow", "--with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "HPO_STORAGE": storage},
        start_new_session=True,  # Ctrl-C in the terminal reaches the run alone
    )
    log = runs_dir / study / f"track-{tracker}.log"
    telling = Thread(target=_tell, args=(process.stderr, tracker, log), daemon=True)
    telling.start()
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        why = _wait(process)
        telling.join(LEAVE_SECONDS)
        if why:
            again = f"To show what is missing there, run `hpo {' '.join(to)}`."
            _logger.warning("The tracker %s: %s. %s", tracker, why, again)


def _tell(lines: IO[str], tracker: TrackerName, log: Path) -> None:
    """Tell each line at once, the same error only once, and keep all lines in a file. Closes `lines`."""
    told = ""
    with lines, log.open("w") as kept:
        for line in lines:
            kept.write(line)
            kept.flush()
            if line.removeprefix("Error: ").strip() not in told:
                _logger.warning("The tracker %s: %s", tracker, shorten(line, 1000))
            told += line


def _wait(process: subprocess.Popen[str]) -> str:
    """Wait for the process to end; return the reason if it has not shown everything, or empty."""
    try:
        code = process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"it took longer than {LEAVE_SECONDS:g} s"
    return f"its process ended with {code}" if code else ""
