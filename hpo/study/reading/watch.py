"""Watch a study from outside, by reading its database again and again.

A terminal shows the trials of a run in the same way whether they run in this process, in others on this
machine or on another.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import violation
from hpo.config.study_config import StudyConfig
from hpo.outcome import Outcome, Progress
from hpo.study.sampling.promotion import PAUSED_ATTR, is_paused
from hpo.study.store.failures import DATABASE_ERRORS
from hpo.study.store.process import this_machine
from hpo.study.store.schema import claims, studies, workers
from hpo.study.store.storage import Storage, count_trials

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyProgress:
    running: Sequence[tuple[FrozenTrial | None, Progress]] = ()
    """Each trial (None: of no study) with its progress at its worker's last heartbeat."""
    ended: Sequence[FrozenTrial] = ()  # trials that have ended or paused since the last read
    best: tuple[float, int] | None = None
    """First objective and number of the best trial within the study's limits."""
    num_done: int = 0


class StudyWatch:
    """Reads a study again and again, without trials that had ended before; with `own`, this process's
    alone.
    """

    def __init__(self, storage: Storage, config: StudyConfig, *, own: bool = False) -> None:
        self._own = own
        self._storage = storage
        self._study = storage.load_study(config.name)
        self._better = max if config.objective[0].direction == "maximize" else min
        self._rests = {_rest_of(trial) for trial in self._study.get_trials(deepcopy=False)}
        self._last = StudyProgress()

    def read(self) -> StudyProgress:
        """Return the study now; its last state if the database is away, or the study was deleted."""
        try:
            self._last = self._read()
        except (*DATABASE_ERRORS, KeyError):
            self._last = replace(self._last, ended=())
        return self._last

    def _read(self) -> StudyProgress:
        trials = self._study.get_trials(deepcopy=False)
        progress_of, ours, num_done = self._read_claims()
        running, ended, complete = [], [], []
        for trial in trials:
            rest = _rest_of(trial)
            if trial.state == TrialState.COMPLETE and not violation(trial.constraints):
                complete.append((trial.values[0], trial.number))
            if trial.number in progress_of and not trial.state.is_finished():
                progress = json.loads(progress_of[trial.number] or "{}")
                if progress.pop("trial", None) != trial.number:  # of its worker's last one
                    progress = {"part": "check"}
                known = {one.name: progress[one.name] for one in fields(Progress) if one.name in progress}
                running.append((trial, Progress(**known)))  # a later hpo may write more
            elif rest is not None and rest not in self._rests:
                self._rests.add(rest)
                if not self._own or trial.user_attrs.get("worker") in ours:
                    ended.append(trial)
        best = self._better(complete, key=lambda each: each[0], default=None)
        return StudyProgress(running, ended, best, num_done)

    def _read_claims(self) -> tuple[dict[int, str | None], set[str], int]:
        name = self._study.study_name
        of_study = [workers.c.study == name]
        if self._own:
            of_study += [workers.c.machine == this_machine(), workers.c.pid == os.getpid()]
        query = sa.select(workers.c.id, workers.c.progress, claims.c.trial_number)
        query = query.join(claims, (claims.c.owner == workers.c.id) & (claims.c.study == name), isouter=True)
        with self._storage.engine.connect() as connection:
            rows = connection.execute(query.where(*of_study)).all()
            num_done = count_trials(connection, studies.c.name == name)[name]["done"]
        progress_of = {row.trial_number: row.progress for row in rows if row.trial_number is not None}
        return progress_of, {row.id for row in rows}, num_done


def _rest_of(trial: FrozenTrial) -> tuple[int, float | None] | None:
    """Return a key for the end or the present pause of a trial; None while it may run."""
    if trial.state.is_finished():
        return trial.number, None
    return (trial.number, trial.user_attrs[PAUSED_ATTR]) if is_paused(trial) else None


def outcome_of(trial: FrozenTrial) -> str:
    if is_paused(trial):
        return Outcome.PAUSED
    outcome: str = trial.user_attrs.get("outcome", Outcome.FAILED)  # none if the dashboard ended it
    return outcome


@contextmanager
def watching(
    read: Callable[[], StudyProgress], show: Callable[[StudyProgress], None], seconds: float = 0.5
) -> Iterator[None]:
    """Call `show` with what `read` returns, in a thread during the block, and once at its end."""
    leaving = threading.Event()

    def repeat() -> None:
        while not leaving.wait(seconds):
            show(read())

    with ThreadPoolExecutor(1, "watch") as pool:
        repeating = pool.submit(repeat)
        try:
            yield
        finally:
            leaving.set()
            try:
                repeating.result()  # raises an exception of the thread
                show(read())
            except Exception as error:  # of the display: the result of the block counts
                _logger.warning("The display of the trials failed: %s: %s", type(error).__name__, error)
