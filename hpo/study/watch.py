"""What happens in a study, as events: read from its database, whoever makes it happen.

A terminal shows the trials of a run in the same way whether they run in this process, in others on this
machine or on another.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import sqlalchemy as sa
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from hpo.outcome import Outcome
from hpo.study.process import this_machine
from hpo.study.schema import evaluations, slots, studies, workers
from hpo.study.storage import Storage


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


OnEvent = Callable[[TrialEvent], None]


@dataclass
class _Seen:
    """What a watch has told about a trial that has not ended."""

    num_evaluations: int = 0
    last_step: int = -1


@dataclass(frozen=True)
class _State:
    """A study as the database has it at one moment."""

    in_hand: frozenset[int]
    """The trials that workers have."""
    given_back: frozenset[int]
    """The trials that a worker gave back, to go on later."""
    watched: frozenset[int] | None
    """The trials that are told of; None: all."""
    trials: list[FrozenTrial]
    evaluations: Mapping[int, list[Any]] = field(default_factory=dict)


class StudyWatch:
    """Tells what has changed in a study since the last look; what was there before the first is not told.

    With `own`, only of trials that this process has, or had last.
    """

    def __init__(self, storage: Storage, name: str, *, own: bool = False) -> None:
        self._own = own
        self._storage = storage
        self._name = name
        self._study = storage.load_study(name)
        with storage.engine.connect() as connection:
            query = sa.select(studies.c.definition).where(studies.c.name == name)
            definition = json.loads(connection.execute(query).scalar_one())
        self._metrics = [objective["metric"] for objective in definition["objective"]]
        space = definition["search_space"]
        self._always_suggested = {key for key, value in space.items() if not value.get("when")}
        trials = self._study.get_trials(deepcopy=False)
        self._ended = {trial.number for trial in trials if trial.state.is_finished()}
        self._running: dict[int, _Seen] = {}
        self._left: dict[int, _Seen] = {}  # given back by their workers, to go on later
        state = self._read()
        self._left |= {number: _Seen() for number in state.given_back}
        for number, rows in state.evaluations.items():
            self._left[number] = _Seen(len(rows), rows[-1].step)

    def look(self) -> list[TrialEvent]:
        """Return what has happened since the last look, in order within each trial."""
        try:
            state = self._read()
        except (SQLAlchemyError, StorageInternalError):
            return []  # the database is away; the workers wait for it, and so does the watch
        events: list[TrialEvent] = []
        for trial in state.trials:
            if trial.number not in self._ended and trial.state != TrialState.WAITING:
                events += self._changes(trial, state)
        return events

    def _read(self) -> _State:
        query = sa.select(slots.c.trial_number, slots.c.state).where(slots.c.study == self._name)
        if self._own:
            here = (workers.c.machine == this_machine(), workers.c.pid == os.getpid())
            query = query.where(slots.c.owner.in_(sa.select(workers.c.id).where(*here)))
        else:
            query = query.where(slots.c.state != "done", slots.c.trial_number.is_not(None))
        with self._storage.engine.connect() as connection:
            # Before the trials: one that ends in between is then told as ended and not as given back.
            found = connection.execute(query).all()
        in_hand, given_back = (
            frozenset(row.trial_number for row in found if row.state == state)
            for state in ("running", "open")
        )
        watched = frozenset(row.trial_number for row in found) if self._own else None
        trials = self._study.get_trials(deepcopy=False)
        open_numbers = [trial.number for trial in trials if trial.number not in self._ended]
        rows: dict[int, list[Any]] = {}
        with self._storage.engine.connect() as connection:
            of_open = evaluations.c.trial_number.in_(open_numbers)
            query = sa.select(evaluations).where(evaluations.c.study == self._name, of_open)
            for row in connection.execute(query.order_by(evaluations.c.step)):
                rows.setdefault(row.trial_number, []).append(row)
        return _State(in_hand, given_back, watched, trials, rows)

    def _changes(self, trial: FrozenTrial, state: _State) -> Iterator[TrialEvent]:
        number, ended = trial.number, trial.state.is_finished()
        if number not in self._running:
            if state.watched is not None and number not in state.watched:
                return
            begun = number in state.in_hand or (number in state.given_back and number not in self._left)
            if not ended and not (begun and self._always_suggested <= trial.params.keys()):
                return
            seen = self._running[number] = self._left.pop(number, _Seen())
            yield TrialEvent("started", number, trial.params, num_evaluations=seen.num_evaluations)
        seen = self._running[number]
        for row in state.evaluations.get(number, ()):
            if row.step > seen.last_step:
                seen.last_step = row.step
                seen.num_evaluations += 1
                metrics = json.loads(row.metrics)
                values = tuple(metrics[name] for name in self._metrics if metrics.get(name) is not None)
                yield TrialEvent(
                    "evaluated",
                    number,
                    trial.params,
                    values if len(values) == len(self._metrics) else None,
                    seen.num_evaluations,
                    row.seconds,
                )
        if ended:
            self._ended.add(number)
            outcome, reason = (trial.user_attrs.get(key, "") for key in ("outcome", "outcome_reason"))
        elif number in state.in_hand:
            return
        else:
            self._left[number] = seen
            outcome, reason = Outcome.PREEMPTED, ""
        del self._running[number]
        final = tuple(trial.values) if trial.state == TrialState.COMPLETE else None
        yield TrialEvent("finished", number, trial.params, final, outcome=outcome, reason=reason)


@contextmanager
def watching(
    storage: Storage, name: str, on_event: OnEvent, *, own: bool = False, seconds: float = 0.5
) -> Iterator[None]:
    """Call `on_event`, in a thread, with what a `StudyWatch` tells during the block, until its end."""
    watch = StudyWatch(storage, name, own=own)
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
