"""What happens in a study, look by look: read from its database, whoever makes it happen.

A terminal shows the trials of a run in the same way whether they run in this process, in others on this
machine or on another.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.config.limits import violation
from hpo.outcome import Outcome
from hpo.study.sampling.promotion import PAUSED_ATTR, is_paused
from hpo.study.store.failures import DATABASE_ERRORS
from hpo.study.store.process import this_machine
from hpo.study.store.schema import claims, studies, workers
from hpo.study.store.storage import count_trials

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.store.storage import Storage


@dataclass(frozen=True)
class Look:
    """A study at one moment."""

    running: Sequence[tuple[FrozenTrial, Mapping[str, Any]]] = ()
    """Each with the fields of `hpo.trial.telemetry.Progress` as of its worker's last heartbeat, or none."""
    ended: Sequence[FrozenTrial] = ()
    """Trials that have ended or paused since the look before."""
    best: tuple[float, int] | None = None
    """Value of the first objective and number of the best trial that meets the study's limits."""
    num_done: int = 0


class StudyWatch:
    """Looks at a study again and again. Trials that had ended before the watch was made are not reported.

    With `own`, it looks only at trials that this process has, or had last.
    """

    def __init__(self, storage: Storage, config: StudyConfig, *, own: bool = False) -> None:
        self._own = own
        self._storage = storage
        self._study = storage.load_study(config.name)
        self._better = max if config.objective[0].direction == "maximize" else min
        trials = self._study.get_trials(deepcopy=False)
        self._rested = {_rest_of(trial) for trial in trials}
        self._last = Look()

    def look(self) -> Look:
        """The study now; as it was where its database is away, which workers wait for, or it is deleted."""
        try:
            self._last = self._read()
        except (*DATABASE_ERRORS, KeyError):
            self._last = replace(self._last, ended=())
        return self._last

    def _read(self) -> Look:
        trials = self._study.get_trials(deepcopy=False)
        progress_of, ours, num_done = self._read_claims()
        running, ended, complete = [], [], []
        for trial in trials:
            rest = _rest_of(trial)
            if trial.state == TrialState.COMPLETE and not violation(trial.constraints):
                complete.append((trial.values[0], trial.number))
            if trial.number in progress_of and not trial.state.is_finished():
                progress = json.loads(progress_of[trial.number] or "{}")
                is_of_trial = progress.get("trial") == trial.number  # and not of its worker's last one
                running.append((trial, progress if is_of_trial else {}))
            elif rest is not None and rest not in self._rested:
                self._rested.add(rest)
                if not self._own or trial.user_attrs.get("worker") in ours:
                    ended.append(trial)
        best = self._better(complete, key=lambda each: each[0], default=None)
        return Look(running, ended, best, num_done)

    def _read_claims(self) -> tuple[dict[int, str | None], set[str], int]:
        """The progress of each running trial by its number, the ids of the workers, and how many are done."""
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
    """What tells the end or the pause of a trial from its earlier ones; None: it runs, or may run."""
    if trial.state.is_finished():
        return trial.number, None
    return (trial.number, trial.user_attrs[PAUSED_ATTR]) if is_paused(trial) else None


def outcome_of(trial: FrozenTrial) -> str:
    """How a trial has ended, or that it has paused."""
    if is_paused(trial):
        return Outcome.PAUSED
    outcome: str = trial.user_attrs.get("outcome", Outcome.FAILED)  # in the dashboard one may be given up
    return outcome


@contextmanager
def watching(watch: StudyWatch, show: Callable[[Look], None], seconds: float = 0.5) -> Iterator[None]:
    """Call `show`, in a thread, with each look of `watch` during the block, and once at its end."""
    leaving = threading.Event()

    def look_again_and_again() -> None:
        while not leaving.wait(seconds):
            show(watch.look())

    with ThreadPoolExecutor(1, "watch") as pool:
        looking = pool.submit(look_again_and_again)
        try:
            yield
        finally:
            leaving.set()
            looking.result()  # raises what the thread raised
            show(watch.look())
