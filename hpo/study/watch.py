"""What happens in a study, as events: read from its database, whoever makes it happen.

A terminal shows the trials of a run in the same way whether they run in this process, in others on this
machine or on another.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from hpo.outcome import Outcome
from hpo.study.process import this_machine
from hpo.study.schema import evaluations, slots, workers
from hpo.study.storage import Storage

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig


@dataclass(frozen=True)
class TrialEvent:
    """A trial began, was evaluated, or ended."""

    kind: Literal["started", "evaluated", "finished"]
    number: int
    params: Mapping[str, Any]
    values: tuple[float, ...] | None = None
    """Of the objectives: at this evaluation, or of a complete trial."""
    num_evaluations: int = 0
    """How many the trial has had, this one among them."""
    seconds: float | None = None
    """Of the trial, at this evaluation."""
    outcome: str = ""
    reason: str = ""


@dataclass
class _Seen:
    """What a watch has told about a trial that has not ended."""

    num_evaluations: int = 0
    last_step: int = -1
    with_worker: bool = False
    """False: a worker gave it back, to go on later."""


class StudyWatch:
    """Tells what has changed in a study since the last look; what was there before the first is not told.

    With `own`, only of trials that this process has, or had last.
    """

    def __init__(self, storage: Storage, config: StudyConfig, *, own: bool = False) -> None:
        self._own = own
        self._storage = storage
        self._study = storage.load_study(config.name)
        self._metrics = [objective.metric for objective in config.objective]
        self._always_suggested = {name for name, found in config.search_space.items() if not found.when}
        trials = self._study.get_trials(deepcopy=False)
        self._ended = {trial.number for trial in trials if trial.state.is_finished()}
        slot_states, _, evaluated = self._read()
        self._seen = {number: _Seen() for number, state in slot_states.items() if state == "open"}
        self._seen |= {number: _Seen(len(rows), rows[-1].step) for number, rows in evaluated.items()}

    def look(self) -> list[TrialEvent]:
        """Return what has happened since the last look, in order within each trial."""
        try:
            slot_states, trials, evaluated = self._read()
        except (SQLAlchemyError, StorageInternalError):
            return []  # the database is away; the workers wait for it, and so does the watch
        except KeyError:
            return []  # the study was deleted
        events: list[TrialEvent] = []
        for trial in trials:
            if trial.number not in self._ended and trial.state != TrialState.WAITING:
                events += self._changes(trial, slot_states.get(trial.number), evaluated[trial.number])
        return events

    def _read(self) -> tuple[dict[int, str], list[FrozenTrial], dict[int, list[Any]]]:
        """The states of the slots that are watched, all trials, and evaluations of those that had not ended.

        Slots and evaluations are by the number of their trial.
        """
        name = self._study.study_name
        query = sa.select(slots.c.trial_number, slots.c.state).where(slots.c.study == name)
        if self._own:
            here = (workers.c.machine == this_machine(), workers.c.pid == os.getpid())
            query = query.where(slots.c.owner.in_(sa.select(workers.c.id).where(*here)))
        else:
            query = query.where(slots.c.state != "done", slots.c.trial_number.is_not(None))
        with self._storage.engine.connect() as connection:
            # Before the trials: one that ends in between is then told as ended and not as given back.
            slot_states = {row.trial_number: row.state for row in connection.execute(query)}
        trials = self._study.get_trials(deepcopy=False)
        unfinished = [trial.number for trial in trials if trial.number not in self._ended]
        evaluated: dict[int, list[Any]] = defaultdict(list)
        with self._storage.engine.connect() as connection:
            of_unfinished = (evaluations.c.study == name, evaluations.c.trial_number.in_(unfinished))
            query = sa.select(evaluations).where(*of_unfinished).order_by(evaluations.c.step)
            for row in connection.execute(query):
                evaluated[row.trial_number].append(row)
        return slot_states, trials, evaluated

    def _changes(
        self, trial: FrozenTrial, slot_state: str | None, evaluated: list[Any]
    ) -> Iterator[TrialEvent]:
        number, ended = trial.number, trial.state.is_finished()
        seen = self._seen.get(number)
        if seen is None or not seen.with_worker:
            if self._own and slot_state is None:
                return
            begun = slot_state == "running" or (slot_state == "open" and seen is None)
            if not ended and not (begun and self._always_suggested <= trial.params.keys()):
                return
            seen = self._seen.setdefault(number, _Seen())
            seen.with_worker = True
            yield TrialEvent("started", number, trial.params, num_evaluations=seen.num_evaluations)
        for row in evaluated:
            if row.step > seen.last_step:
                seen.last_step = row.step
                seen.num_evaluations += 1
                values = self._values(json.loads(row.metrics))
                yield TrialEvent("evaluated", number, trial.params, values, seen.num_evaluations, row.seconds)
        outcome, reason = (trial.user_attrs.get(key, "") for key in ("outcome", "outcome_reason"))
        if ended:
            self._ended.add(number)
        elif slot_state == "running":
            return
        else:
            outcome, reason = Outcome.PREEMPTED, ""
        seen.with_worker = False
        final = tuple(trial.values) if trial.state == TrialState.COMPLETE else None
        yield TrialEvent("finished", number, trial.params, final, outcome=outcome, reason=reason)

    def _values(self, metrics: Mapping[str, Any]) -> tuple[float, ...] | None:
        """The values of the objectives; None where one is missing."""
        values: tuple[Any, ...] = tuple(metrics.get(name) for name in self._metrics)
        return None if None in values else values


@contextmanager
def watching(
    storage: Storage,
    config: StudyConfig,
    on_event: Callable[[TrialEvent], None],
    *,
    own: bool = False,
    seconds: float = 0.5,
) -> Iterator[None]:
    """Call `on_event`, in a thread, with what a `StudyWatch` tells during the block, until its end."""
    watch = StudyWatch(storage, config, own=own)
    leaving = threading.Event()

    def tell() -> None:
        for event in watch.look():
            on_event(event)

    def look_again_and_again() -> None:
        while not leaving.wait(seconds):
            tell()

    with ThreadPoolExecutor(1, "watch") as pool:
        looking = pool.submit(look_again_and_again)
        try:
            yield
        finally:
            leaving.set()
            looking.result()  # raises what the thread raised
            tell()
