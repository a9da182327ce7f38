"""Keeps a tracker in step with a study. The database is the truth; the tracker is a copy that may be away.

A run counts as shown only when the tracker has taken all of it, so a later look brings what it missed.
Nothing is written to the database, and no worker waits for a tracker.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from hpo.config.trackers import TrackerName
from hpo.errors import InputError, TrackerError
from hpo.study.reading.study_record import StudyRecord
from hpo.track.runs import Run, is_over, runs_of
from hpo.versions import install_hint

LOOK_SECONDS = 5.0
"""Time between two looks, or 20 times the time to read the study if this is longer."""
IDLE_SECONDS = 600.0
"""How long a study without workers is followed: perhaps no device can run the rest, or its time is over."""

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A place to show runs. All methods may raise TrackerError."""

    @property
    def where(self) -> str:
        """The place, for people."""

    def show(self, run: Run, /) -> bool:
        """Show the trial as in `run`, and return True if this changed anything."""

    def close(self) -> None:
        """Finish open runs."""


@dataclass
class Shown:
    """The work of a command on a tracker."""

    runs: int = 0
    """Runs of the study at the last look."""
    changed: int = 0
    """Runs made or changed in the tracker."""
    is_over: bool = False
    """True if the study has ended."""
    idle_seconds: float = math.inf
    """Since a worker was last seen in it; infinite: none ever was."""


class Follower:
    """Shows one study in one tracker."""

    def __init__(self, read: Callable[[], StudyRecord], token: str, tracker: Tracker) -> None:
        self._read, self._token, self._tracker = read, token, tracker
        self._digests: dict[str, str] = {}
        self._changed: set[str] = set()
        self._read_seconds = 0.0
        self._heartbeats: dict[str, datetime] = {}
        self._heard = time.monotonic()

    def look(self) -> Shown:
        """Bring the tracker to the study as it is now. Raises TrackerError."""
        started = time.monotonic()
        record = self._read()
        self._read_seconds = time.monotonic() - started
        runs = runs_of(record, self._token)
        for run in runs:
            if self._digests.get(run.key) != run.digest:
                if self._tracker.show(run):
                    self._changed.add(run.key)
                self._digests[run.key] = run.digest
        heartbeats = {worker.id: worker.last_seen for worker in record.workers}
        if heartbeats != self._heartbeats:
            self._heartbeats, self._heard = heartbeats, time.monotonic()
        return Shown(len(runs), len(self._changed), is_over(record), time.monotonic() - self._heard)

    def follow(self, stop: threading.Event, idle_seconds: float = IDLE_SECONDS) -> Shown:
        """Look again and again until the study has ended or `stop` is set, and once after that; or until no
        worker was in it for so many seconds.

        A tracker that is away is said once, and tried again. Raises TrackerError where the last look fails.
        """
        away = False
        while True:
            is_last = stop.is_set()
            try:
                shown = self.look()
            except TrackerError as error:
                if is_last:
                    raise
                if not away:
                    _logger.warning("%s It is tried again; nothing is lost.", error)
                away = True
            else:
                if away:
                    _logger.warning("The tracker is back.")
                away = False
                if is_last or shown.is_over:
                    return shown
                if shown.idle_seconds > idle_seconds:
                    _logger.warning(
                        "No worker was in the study for %g s, which has trials left. Once one is, call this "
                        "again: it adds what is new.",
                        idle_seconds,
                    )
                    return shown
            stop.wait(max(LOOK_SECONDS, 20 * self._read_seconds))


def open_tracker(name: TrackerName, record: StudyRecord, token: str, folder: Path) -> Tracker:
    """Return the tracker of this name for a study. It may write files into `folder`.

    Raises InputError if its package is not installed or its address is unknown.
    """
    try:
        if name == "mlflow":
            from hpo.track.mlflow_runs import MlflowTracker

            return MlflowTracker(record.name, token)
        if name == "tensorboard":
            from hpo.track.tensorboard_files import TensorboardTracker

            return TensorboardTracker(folder, token)
        from hpo.track.wandb_runs import WandbTracker

        return WandbTracker(record.name, folder)
    except ImportError as error:
        raise InputError(f"{name} must be installed, but: {error}. {install_hint(name)}") from None
