"""Show a study as a page, in optuna-dashboard, or in a tracker."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpo.api.opening import RUNS, progress_shown
from hpo.api.stored import StoredStudy, StudyResult
from hpo.config.choices import TrackerName
from hpo.errors import InputError
from hpo.report.dashboard import Dashboard, open_dashboard
from hpo.report.report import write_report
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import end_of_job, stop_at_end_of_input, stop_on_signals
from hpo.track.follow import IDLE_SECONDS, Follower, open_tracker


def report(study: StoredStudy, folder: str | Path | None = None) -> Path:
    """Write the page and its tables into a folder; return the page."""
    record = study.record
    return write_report(record, Path(folder or RUNS / record.name / "report"), study.file_name)


@contextmanager
def dashboard(study: StoredStudy, port: int = 8080, host: str = "127.0.0.1") -> Iterator[Dashboard]:
    """Let optuna-dashboard listen during the block."""
    with study.opened() as (database, record), open_dashboard(database, record, port, host) as served:
        yield served


@dataclass(frozen=True)
class Tracked(StudyResult):
    """The trials of a study in a tracker."""

    to: TrackerName
    where: str
    trials: int
    changed: int
    """Number of new or changed runs."""
    was_stopped: bool

    @property
    def exit_code(self) -> int:
        return 130 if self.was_stopped else 0

    def text(self) -> str:
        return f"{self.where}: trials of {self.study}: {self.trials}, new or changed: {self.changed}"


def track(
    study: StoredStudy,
    to: TrackerName,
    *,
    follow: bool = False,
    folder: Path | None = None,
    with_parent: bool = False,
) -> Tracked:
    """Show each trial as a run of a tracker, see `hpo.Study.track`.

    `with_parent`: end when the standard input does.
    """
    if folder is not None and to == "mlflow":
        raise InputError("--folder must be left out with `--to mlflow`, which writes no files.")
    with (
        progress_shown(quiet=study.quiet),
        stop_on_signals(end_of_job(None)) as stop,
        study.opened() as (database, record),
    ):
        stop.can_checkpoint = True
        if with_parent:
            stop_at_end_of_input(stop, reason="")  # the run reports its end itself
        token = database.study_token(record.name)
        default = RUNS / record.name / ("tensorboard" if to == "tensorboard" else "")
        tracker = open_tracker(to, record, token, folder or default)
        follower = Follower(lambda: read_study(database, record.name), token, tracker)
        try:
            # The run that started this command may wait long for its first worker, and ends it itself.
            idle_seconds = math.inf if with_parent else IDLE_SECONDS
            shown = follower.follow(stop, idle_seconds) if follow else follower.update()
        finally:
            tracker.close()
        was_stopped = stop.signal is not None
        return Tracked(record.name, to, tracker.where, shown.runs, shown.changed, was_stopped)
