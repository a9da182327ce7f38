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
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from hpo.config.limits import violation
from hpo.outcome import Outcome
from hpo.study.claims.process import this_machine
from hpo.study.store.schema import slots, workers

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.store.storage import Storage


@dataclass(frozen=True)
class Look:
    """A study at one moment."""

    running: Sequence[tuple[FrozenTrial, Mapping[str, Any]]] = ()
    """Each with the fields of `hpo.trial.telemetry.Progress` as of its worker's last heartbeat, or none."""
    ended: Sequence[FrozenTrial] = ()
    """Trials that have ended since the look before, and whose slots say so: `num_done` counts them."""
    best: tuple[float, int] | None = None
    """Value of the first objective and number of the best trial that meets the study's limits."""
    num_done: int = 0


class StudyWatch:
    """Looks at a study again and again; trials that had ended before the watch was made are not reported.

    With `own`, it looks only at trials that this process has, or had last.
    """

    def __init__(self, storage: Storage, config: StudyConfig, *, own: bool = False) -> None:
        self._own = own
        self._storage = storage
        self._study = storage.load_study(config.name)
        self._better = max if config.objective[0].direction == "maximize" else min
        trials = self._study.get_trials(deepcopy=False)
        self._ended = {trial.number for trial in trials if trial.state.is_finished()}
        self._last = Look()

    def look(self) -> Look:
        """The study now; as it was where its database is away, which workers wait for, or it is deleted."""
        try:
            self._last = self._read()
        except (SQLAlchemyError, StorageInternalError, KeyError):
            self._last = replace(self._last, ended=())
        return self._last

    def _read(self) -> Look:
        slot_of, num_done = self._read_slots()
        running, ended, complete = [], [], []
        for trial in self._study.get_trials(deepcopy=False):
            slot = slot_of.get(trial.number)
            held = slot if slot is not None and slot.state == "running" else None
            if trial.state == TrialState.COMPLETE and not violation(trial.constraints):
                complete.append((trial.values[0], trial.number))
            if held is not None and not trial.state.is_finished():
                progress = json.loads(held.progress or "{}")
                is_of_trial = progress.get("trial") == trial.number  # and not of its worker's last one
                running.append((trial, progress if is_of_trial else {}))
            elif trial.state.is_finished() and held is None and trial.number not in self._ended:
                self._ended.add(trial.number)
                if slot is not None or not self._own:
                    ended.append(trial)
        best = self._better(complete, key=lambda each: each[0], default=None)
        return Look(running, ended, best, num_done)

    def _read_slots(self) -> tuple[dict[int | None, sa.Row[*tuple[Any, ...]]], int]:
        """The slots that are looked at by the number of their trial, and how many of all are done."""
        of_study = slots.c.study == self._study.study_name
        query = sa.select(slots.c.trial_number, slots.c.state, workers.c.progress)
        query = query.where(of_study).join(workers, workers.c.id == slots.c.owner)
        if self._own:
            query = query.where(workers.c.machine == this_machine(), workers.c.pid == os.getpid())
        else:
            query = query.where(slots.c.state == "running")
        done = sa.select(sa.func.count()).where(of_study, slots.c.state == "done")
        with self._storage.engine.connect() as connection:
            slot_of = {row.trial_number: row for row in connection.execute(query)}
            return slot_of, connection.execute(done).scalar_one()


def outcome_of(trial: FrozenTrial) -> str:
    """How a trial has ended."""
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
