"""Keeps a tracker up to date with a study.

The database is the truth, and the tracker is a copy, sometimes unreachable. An update sends all runs with
changes since the tracker last accepted them. Nothing is written to the database, and no worker waits for a
tracker.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from hpo.config.choices import TrackerName
from hpo.errors import InputError, TrackerError
from hpo.redaction import without_secrets
from hpo.report.report import write_report
from hpo.study.reading.study_record import StudyRecord, is_over
from hpo.track.mlflow_runs import MlflowTracker
from hpo.track.runs import Run, digest_of, runs_of, without_secret_settings
from hpo.track.tensorboard_files import TensorboardTracker
from hpo.track.wandb_runs import WandbTracker
from hpo.versions import install_hint

UPDATE_SECONDS = 5.0  # time between two updates, or 20 times the time to read the study if this is longer
IDLE_SECONDS = 600.0
"""Longest wait for a worker. Perhaps no device can run the trials left, or the time of the run is over."""

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A program that shows runs. All methods may raise TrackerError."""

    @property
    def where(self) -> str:
        """Address or folder, for people."""

    def show(self, run: Run, write_files: Callable[[Path], None] | None = None, /) -> bool:
        """Show a trial or a study; return True if this changed anything.

        `write_files` writes the report into a folder, for a tracker that stores files with a run.
        """

    def close(self) -> None:
        """Finish open runs."""


@dataclass
class Shown:
    runs: int  # number of trials in the tracker
    changed: int  # number of trials added or changed by this command
    is_over: bool  # true if the study has ended
    idle_seconds: float  # time since the last new heartbeat of a worker


class Follower:
    """Shows one study in one tracker."""

    def __init__(self, read: Callable[[], StudyRecord], token: str, tracker: Tracker) -> None:
        self._read, self._token, self._tracker = read, token, tracker
        self._digests: dict[str, str] = {}
        self._changed: set[str] = set()
        self._read_seconds = 0.0
        self._heartbeats: dict[str, datetime] = {}
        self._heard = time.monotonic()

    def update(self, *, is_last: bool = True) -> Shown:
        """Show the present state of the study, with its report if `is_last`. Raises TrackerError."""
        started = time.monotonic()
        record = self._read()
        self._read_seconds = time.monotonic() - started
        runs = runs_of(record, self._token)
        for run in runs:
            if self._show(run):
                self._changed.add(run.key)
        if runs and runs[0].study is not None:
            study, write = runs[0].study, None
            if is_last or is_over(record):
                report_of = digest_of([run.digest for run in runs])  # makes a run without this report differ
                study = replace(study, facts={**study.facts, "report_of": report_of})
                write = partial(write_files, record)
            self._show(study, write)
        # The clock of the database may be set, so the time between two heartbeats is measured here.
        heartbeats = {worker.id: worker.last_seen for worker in record.workers}
        if heartbeats != self._heartbeats:
            self._heartbeats, self._heard = heartbeats, time.monotonic()
        return Shown(len(runs), len(self._changed), is_over(record), time.monotonic() - self._heard)

    def _show(self, run: Run, write: Callable[[Path], None] | None = None) -> bool:
        if self._digests.get(run.key) == run.digest:
            return False
        has_changed = self._tracker.show(run, write)
        self._digests[run.key] = run.digest
        return has_changed

    def follow(self, stop: threading.Event, idle_seconds: float = IDLE_SECONDS) -> Shown:
        """Update the tracker until the study has ended, `stop` is set, or no worker was live for some time.

        An unreachable tracker is logged once and tried again. Raises TrackerError if the last update fails.
        """
        is_away = False
        while True:
            is_last = stop.is_set()
            try:
                shown = self.update(is_last=is_last)
            except TrackerError as error:
                if is_last:
                    raise
                if not is_away:
                    _logger.warning("%s It is tried again; nothing is lost.", error)
                is_away = True
            else:
                if is_away:
                    _logger.warning("The tracker is back.")
                is_away = False
                if is_last or shown.is_over:
                    return shown
                if shown.idle_seconds > idle_seconds:
                    _logger.warning(
                        "The study has trials left, but had no worker for %g s. Start a worker and this "
                        "command again: it adds new trials and changes.",
                        idle_seconds,
                    )
                    return shown
            stop.wait(max(UPDATE_SECONDS, 20 * self._read_seconds))


def write_files(record: StudyRecord, folder: Path) -> None:
    """Write the report of a study and its definition, without secrets. Raises TrackerError."""
    record = replace(record, definition=without_secret_settings(record.definition))
    try:
        write_report(record, folder / "report")
    except Exception as error:
        raise TrackerError(
            f"All trials are shown, but the report could not be written: {type(error).__name__}: {error}. "
            f"Run `hpo report {record.name}` to see why."
        ) from error
    (folder / "study.json").write_text(json.dumps(record.definition, indent=2))
    for path in folder.rglob("*.*"):
        path.write_text(without_secrets(path.read_text()))


def open_tracker(name: TrackerName, record: StudyRecord, token: str, folder: Path) -> Tracker:
    """Return the tracker of this name for a study. Raises InputError if it cannot be used."""
    try:
        if name == "mlflow":
            return MlflowTracker(record.name, token)
        if name == "tensorboard":
            return TensorboardTracker(folder, token)
        return WandbTracker(record.name, folder)
    except ImportError as error:
        raise InputError(f"{name} must be installed, but: {error}. {install_hint(name)}") from None
