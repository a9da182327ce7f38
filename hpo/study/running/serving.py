"""A worker that no study is named to: it serves the open studies of a database, one trial after the other.

It goes to the study with the highest `priority` that has a trial to run, and among equals to the one with the
fewest live workers. After each trial it asks again, and leaves the study that it is in for one of a higher
priority, or for an equal one that has fewer workers even when it has gone there.

A study that cannot run here (its data are not here, no precision of it, its code is not trusted) is left to
other workers, with one warning.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpo.config.study_config import stored_study
from hpo.errors import InputError, NoDatabaseError
from hpo.study.reading.overview import StudyOverview, list_studies
from hpo.study.running.run import OpenOptions, OpenStudy, open_study, run_study
from hpo.study.running.stopping import Stop
from hpo.study.store.storage import Storage, open_storage

Shown = Callable[[OpenStudy], AbstractContextManager[object]]

_logger = logging.getLogger(__name__)


@dataclass
class Server:
    """A worker that serves the database at `url`."""

    url: str
    runs_dir: Path
    how: OpenOptions
    """How it opens each study."""
    only: str | None = None
    """The name of the one study that it serves; None: all."""
    idle_timeout: float = 0.0
    """Seconds for which it waits while no open study has an unfinished trial for it, before it leaves."""
    shown: Shown = lambda _: nullcontext()
    """Around the trials of each study."""
    poll_seconds: float = 2.0
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """Of its trials so far, by study."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The studies that cannot run here, with the reason."""
    _left_out: set[tuple[str, float, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.stop = self.how.stop or Stop()

    def serve(self) -> Literal["idle", "stopped", "timeout"]:
        """Run trials of the open studies until none is left for this worker.

        Raises NoDatabaseError where there is no database and none is waited for, StoppedError where it is
        told to stop while the database is away, RunError for what concerns more than a study.
        """
        idle_since = None
        while not self.stop.is_set():
            if time.monotonic() > self.stop.deadline:
                return "timeout"
            possible = self._look()
            if study := next_study(possible):
                idle_since = None
                self._serve_study(study)
                gc.unfreeze()  # what the study's trials froze may be garbage now
                gc.collect()
                continue
            # Others may run what is left: if one of them dies, this worker takes over.
            idle_since = None if possible else idle_since or time.monotonic()
            if idle_since and time.monotonic() - idle_since >= self.idle_timeout:
                return "idle"
            self.stop.wait(self.poll_seconds)
        return "stopped"

    def _look(self) -> list[StudyOverview]:
        try:
            with open_storage(self.url, create=False, stop=self.stop) as storage:
                return self._possible(storage)
        except NoDatabaseError:
            if not self.idle_timeout:
                raise
            return []

    def _possible(self, storage: Storage) -> list[StudyOverview]:
        """The studies with unfinished trials that this worker may serve."""
        studies = [study for study in list_studies(storage) if study.state == "open"]
        wanted = [study for study in studies if self.only in (None, study.name)]
        return [study for study in wanted if _key(study) not in self._left_out]

    def _serve_study(self, study: StudyOverview) -> None:
        def stays() -> bool:
            return stays_in(study.name, self._possible(opened.storage))

        try:
            with open_storage(self.url, create=False, stop=self.stop) as storage:
                config = stored_study(study.name, storage.read_definition(study.name))
            with open_study(config, self.url, self.runs_dir, self.how) as opened, self.shown(opened):
                summary = run_study(opened, stop=self.stop, goes_on=stays)
        except InputError as error:
            self._leave_out(study, str(error))
            return
        self.outcomes.setdefault(study.name, Counter()).update(summary.outcomes)
        if summary.ended == "elsewhere":
            device = " or ".join(summary.elsewhere)
            self._leave_out(study, f"what is left of it needs a device with {device}")
        elif summary.ended == "timeout" and time.monotonic() <= self.stop.deadline:
            self._leave_out(study, f"this worker was in it for the study's `timeout` of {config.timeout} s")

    def _leave_out(self, study: StudyOverview, reason: str) -> None:
        self._left_out.add(_key(study))
        self.left_out[study.name] = reason
        _logger.warning("The study `%s` is left to other workers: %s", study.name, reason)


def _key(study: StudyOverview) -> tuple[str, float, int]:
    """Made anew, or with more trials, a study that was left out may have one for this worker."""
    return study.name, study.created, study.trials["total"]


def next_study(studies: Sequence[StudyOverview], here: str = "") -> StudyOverview | None:
    """The study that a worker serves next, which is in `here` now; None: no study has an open trial."""

    def rank(study: StudyOverview) -> tuple[int, int, bool]:
        is_here = study.name == here
        return -study.priority, study.workers - is_here, not is_here

    return min((study for study in studies if study.trials["open"]), key=rank, default=None)


def stays_in(name: str, possible: Sequence[StudyOverview]) -> bool:
    """Whether a worker goes on with the study that it is in; `run_study` notices when that ends."""
    study = next_study(possible, here=name)
    return study is None or study.name == name or name not in [other.name for other in possible]
