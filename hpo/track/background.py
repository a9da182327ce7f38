"""A tracker in a process of its own, so that it cannot disturb the search.

The process ends when its standard input closes, also if this process is killed.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO

from hpo.config.choices import TrackerName
from hpo.errors import shorten

LEAVE_SECONDS = 120.0  # longest wait at the end of a run for the tracker's last updates and the report

_logger = logging.getLogger(__name__)


@contextmanager
def track_in_background(
    study: str, tracker: TrackerName | None, storage: str, runs_dir: Path
) -> Iterator[None]:
    """Show a study in the tracker during the block, and log the tracker's messages.

    `storage` is the database, as a user names it.
    """
    if tracker is None:
        yield
        return
    command = ["track", study, "--to", tracker]
    process = subprocess.Popen(
        [sys.executable, "-m", "hpo", *command, "--follow", "--with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "HPO_STORAGE": storage},
        start_new_session=True,  # Ctrl-C in the terminal reaches the run alone
    )
    log = runs_dir / study / f"track-{tracker}.log"
    reader = Thread(target=_log_messages, args=(process.stderr, tracker, log), daemon=True)
    reader.start()
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        problem = _wait(process)
        reader.join(LEAVE_SECONDS)
        if problem:
            remedy = f"To show what is missing there, run `hpo {' '.join(command)}`."
            _logger.warning("The tracker %s: %s. %s", tracker, problem, remedy)


def _log_messages(lines: IO[str], tracker: TrackerName, log: Path) -> None:
    """Log each line at once, a repeated error once; write all lines to a file. Close `lines`."""
    logged = ""
    with lines, log.open("w") as file:
        for line in lines:
            file.write(line)
            file.flush()
            if line.removeprefix("Error: ").strip() not in logged:
                _logger.warning("The tracker %s: %s", tracker, shorten(line, 1000))
            logged += line


def _wait(process: subprocess.Popen[str]) -> str:
    try:
        code = process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"it took longer than {LEAVE_SECONDS:g} s"
    return f"its process ended with {code}" if code else ""
