"""A study in MLflow, TensorBoard or W&B: the work of `hpo.Study.track`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpo.api.lifecycle import StudyResult
from hpo.api.opening import RUNS
from hpo.config.choices import TrackerName
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.running.stopping import Stop, stop_at_end_of_input
from hpo.study.store.storage import Storage
from hpo.track.follow import Follower, open_tracker


@dataclass(frozen=True)
class Tracked(StudyResult):
    """The trials of a study in a tracker."""

    to: TrackerName
    where: str
    trials: int
    changed: int
    """Number of runs that were made or changed."""
    was_stopped: bool

    @property
    def exit_code(self) -> int:
        return 130 if self.was_stopped else 0

    def text(self) -> str:
        return f"{self.where}: trials of {self.study}: {self.trials}, new or changed: {self.changed}"


def track(
    study: tuple[Storage, StudyRecord],
    to: TrackerName,
    stop: Stop,
    *,
    follow: bool,
    folder: Path | None,
    with_parent: bool,
) -> Tracked:
    """Show the trials of a study in a tracker, see `hpo.Study.track`."""
    database, record = study
    stop.can_checkpoint = True
    if with_parent:
        stop_at_end_of_input(stop, reason="")  # the run tells about its end itself
    token = database.study_token(record.name)
    default = RUNS / record.name / ("tensorboard" if to == "tensorboard" else "")
    tracker = open_tracker(to, record, token, folder or default)
    follower = Follower(lambda: read_study(database, record.name), token, tracker)
    try:
        shown = follower.follow(stop) if follow else follower.update()
    finally:
        tracker.close()
    was_stopped = stop.signal is not None
    return Tracked(record.name, to, tracker.where, shown.runs, shown.changed, was_stopped)
