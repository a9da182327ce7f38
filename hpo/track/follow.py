"""Keeps a tracker in step with a study. The database is the truth; the tracker is a copy that may be away.

A run counts as shown only when the tracker has taken all of it, so a later look brings what it missed.
Nothing is written to the database, and no worker waits for a tracker.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from hpo.config.trackers import TrackerName
from hpo.errors import InputError, TrackerError
from hpo.redaction import without_secrets
from hpo.study.reading.study_record import StudyRecord, is_over
from hpo.track.runs import Run, digest_of, runs_of
from hpo.track.settings import without_secret_settings
from hpo.versions import install_hint

LOOK_SECONDS = 5.0
"""Time between two looks, or 20 times the time to read the study if this is longer."""
REPORT_SECONDS = 600.0
"""Time between two reports of a study that is followed; the last look always brings one."""
IDLE_SECONDS = 600.0
"""How long a study without workers is followed: perhaps no device can run the rest, or its time is over."""

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A place to show runs. All methods may raise TrackerError."""

    @property
    def where(self) -> str:
        """The place, for people."""

    def show(self, run: Run, write_files: Callable[[Path], None] | None = None, /) -> bool:
        """Show the trial or the study as in `run`, and return True if this changed anything.

        `write_files` writes into a folder what a tracker with a place for files keeps with the run.
        """

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
        self._reported, self._report_of = time.monotonic(), ""
        """The time of the last report, and the digest of its trials; empty: there is none."""
        self._heartbeats: dict[str, datetime] = {}
        self._heard = time.monotonic()

    def look(self, *, is_last: bool = True) -> Shown:
        """Bring the tracker to the study as it is now. Raises TrackerError."""
        started = time.monotonic()
        record = self._read()
        self._read_seconds = time.monotonic() - started
        runs = runs_of(record, self._token)
        for run in runs:
            if self._show(run):
                self._changed.add(run.key)
        if runs:
            self._show_study(record, runs, is_last=is_last or is_over(record))
        heartbeats = {worker.id: worker.last_seen for worker in record.workers}
        if heartbeats != self._heartbeats:
            self._heartbeats, self._heard = heartbeats, time.monotonic()
        return Shown(len(runs), len(self._changed), is_over(record), time.monotonic() - self._heard)

    def _show(self, run: Run, write_files: Callable[[Path], None] | None = None) -> bool:
        if self._digests.get(run.key) == run.digest:
            return False
        has_changed = self._tracker.show(run, write_files)
        self._digests[run.key] = run.digest
        return has_changed

    def _show_study(self, record: StudyRecord, runs: Sequence[Run], *, is_last: bool) -> None:
        """Show the run of the study, from time to time and at the end with its report."""
        study, report_of = runs[0].study, self._report_of
        assert study is not None
        is_due = is_last or time.monotonic() - self._reported > REPORT_SECONDS
        if is_due:
            self._reported, report_of = time.monotonic(), digest_of([run.digest for run in runs])
        run = replace(study, facts={**study.facts, "report_of": report_of} if report_of else study.facts)
        self._show(run, partial(write_files, record) if is_due else None)
        self._report_of = report_of

    def follow(self, stop: threading.Event, idle_seconds: float = IDLE_SECONDS) -> Shown:
        """Look again and again until the study has ended or `stop` is set, and once after that; or until no
        worker was in it for so many seconds.

        A tracker that is away is said once, and tried again. Raises TrackerError where the last look fails.
        """
        away = False
        while True:
            is_last = stop.is_set()
            try:
                shown = self.look(is_last=is_last)
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


def write_files(record: StudyRecord, folder: Path) -> None:
    """Write the report of a study and its whole definition, without secrets.

    Raises TrackerError if a record that somebody has changed breaks the report.
    """
    from hpo.report.report import write_report

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
