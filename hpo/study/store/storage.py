"""The study database: definitions, sizes and results of studies.

Optuna keeps the trials. Our tables (`schema`) keep the definition, the claims and workers, every evaluation
and the compatibility checks. Each call costs a commit, so one JSON attribute holds a trial's telemetry.

No two clocks are compared: a worker is silent while its row does not change, by the monotonic clock of the
watching process. Time without access to the database does not count. After an outage all workers were silent,
and the first worker to return must not take over the trials of all others.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any, TypeVar

import optuna
import sqlalchemy as sa
from optuna.study import Study
from optuna.trial import TrialState
from sqlalchemy.exc import IntegrityError

from hpo.errors import NoStudyError, OutageError, StoppedError, StorageError, did_you_mean
from hpo.json_safe import json_safe
from hpo.redaction import redact
from hpo.study.store import optuna_internals
from hpo.study.store.database import storage_url
from hpo.study.store.failures import (
    DATABASE_ERRORS,
    definition_of,
    explain,
    is_locked,
    is_outage,
    is_wrong_input,
)
from hpo.study.store.opening import exclusive, open_database, optuna_storage
from hpo.study.store.optuna_internals import OwnTrials
from hpo.study.store.process import is_running, this_machine
from hpo.study.store.schema import claims, compat, studies, workers

_logger = logging.getLogger(__name__)

T = TypeVar("T")
TOKEN_ATTR = "hpo:token"
"""System attribute of a study: distinguishes it from a deleted study of the same name."""
COMPARISON_ATTR = "comparison:"  # prefix of a study's user attributes with results of `hpo compare`


class Availability:
    def __init__(self) -> None:
        self._last_answer = -math.inf
        self._away_since: float | None = None
        self._watched: dict[str, tuple[object, float]] = {}

    @property
    def is_away(self) -> bool:
        """True if the last call got no answer."""
        return self._away_since is not None

    def note_answer(self, longest_gap: float) -> None:
        """Note an answer of the database. After more than `longest_gap` seconds, silence is unknown."""
        self._forget_after_gap(longest_gap)
        self._last_answer = time.monotonic()
        if self._away_since is not None:
            _logger.warning("The database is back after %.0f s.", self._last_answer - self._away_since)
            self._away_since = None

    def note_outage(self, explanation: str) -> None:
        self._watched.clear()
        if self._away_since is None:
            self._away_since = time.monotonic()
            _logger.warning("The database is away; waiting for it. (%s)", explanation)

    def silent_seconds(self, worker: str, heartbeat: object, longest_gap: float) -> float:
        """Return how long this process has seen the same heartbeat of a worker without a break.

        A break is an outage, or a `longest_gap` without a call of this process.
        """
        self._forget_after_gap(longest_gap)
        now = time.monotonic()
        last, since = self._watched.get(worker, (None, now))
        if last != heartbeat:
            since = now
        self._watched[worker] = (heartbeat, since)
        return now - since

    def _forget_after_gap(self, longest_gap: float) -> None:
        if time.monotonic() - self._last_answer > longest_gap:
            self._watched.clear()


def _in_optuna() -> sa.ColumnElement[bool]:
    made, attributes = optuna_internals.studies, optuna_internals.study_system_attributes
    token = sa.literal('"') + studies.c.token + '"'  # JSON
    same_token = (attributes.c.key == TOKEN_ATTR, attributes.c.value_json == token)
    same_study = (made.c.study_name == studies.c.name, attributes.c.study_id == made.c.study_id)
    return sa.exists(sa.select(sa.literal(1)).where(*same_study, *same_token).correlate(studies))


_IN_OPTUNA = _in_optuna()
"""Condition: the Optuna study of a row of `hpo_studies` exists. The dashboard can delete it."""


def is_stored(study: str, token: str, *where: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Return the condition that this very study exists, not a later one of the same name."""
    this = (studies.c.name == study, studies.c.token == token, _IN_OPTUNA, *where)
    return sa.exists(sa.select(sa.literal(1)).select_from(studies).where(*this))


def count_trials(
    connection: sa.Connection, *where: sa.ColumnElement[bool], alive: Container[str] | None = None
) -> dict[str, dict[str, int]]:
    """Count the `n_trials` of each study by state: `open` (not begun), `running`, `done`, `paused` if any.

    `where` selects rows of `hpo_studies`. With `alive`, the ids of the live workers, a begun trial without
    one of them is `paused` at its rung, or `open`.
    """
    trials, made = optuna_internals.trials, optuna_internals.studies
    at_rung = claims.c.paused_at.is_not(None).label("at_rung")
    same_trial = (trials.c.study_id == made.c.study_id) & (trials.c.number == claims.c.trial_number)
    groups = (studies.c.name, trials.c.state, at_rung, claims.c.owner)
    query = sa.select(*groups, sa.func.count()).where(claims.c.counts, *where).group_by(*groups)
    query = query.join(claims, claims.c.study == studies.c.name)
    query = query.join(made, made.c.study_name == studies.c.name).join(trials, same_trial)
    sizes = connection.execute(sa.select(studies.c.name, studies.c.n_trials).where(*where)).all()
    counts = {row.name: Counter({"open": 0, "running": 0, "done": 0}) for row in sizes}
    for name, state, is_at_rung, owner, count in connection.execute(query):
        has_worker = owner is not None or not is_at_rung if alive is None else owner in alive
        if state == TrialState.WAITING:
            kind = "open"  # the retry of a failed attempt
        elif state != TrialState.RUNNING:
            kind = "done"
        elif has_worker:
            kind = "running"
        else:
            kind = "paused" if is_at_rung else "open"
        counts[name][kind] += count
    for row in sizes:
        counts[row.name]["open"] += max(0, row.n_trials - counts[row.name].total())
    return {name: dict(of_study) for name, of_study in counts.items()}


def num_begun(connection: sa.Connection, study: str) -> int:
    """Count the begun ones of a study's `n_trials`."""
    counted = (claims.c.study == study, claims.c.counts)
    return int(connection.execute(sa.select(sa.func.count()).where(*counted)).scalar_one())


def num_open(connection: sa.Connection, study: str) -> int:
    """Count the `n_trials` of a study that have not begun; negative after `n_trials` was lowered."""
    size = connection.execute(sa.select(studies.c.n_trials).where(studies.c.name == study)).scalar()
    return (size or 0) - num_begun(connection, study)


def open_storage(url: str, *, create: bool = True, stop: threading.Event | None = None) -> Storage:
    """Connect to the study database at `url` and create missing tables.

    Without `create`, a missing database is an error. A worker waits for an unavailable one until `stop` is
    set. Raises StorageError if the URL cannot be used, RunError (OutageError) if the database cannot be used
    now.
    """
    return Storage(url, create, stop)


def existing_database(storage: str | None, stop: threading.Event | None = None) -> Storage:
    """Open the database at a URL, or the default one. Raises NoDatabaseError if there is none.

    With `stop`, wait for a database that is away until `stop` is set.
    """
    return open_storage(storage_url(storage), create=False, stop=stop)


class Storage:
    lease_seconds = 60.0  # a worker is dead after this silence, unless its process runs on this machine
    patience_seconds = 3600.0  # longest wait of a call for an unavailable database (restart, network)

    def __init__(self, url: str, create: bool, stop: threading.Event | None) -> None:
        self.url = url
        self.stop = stop or threading.Event()
        """Set to stop this process: no call waits for the database any more."""
        self.availability = Availability()

        def open_once() -> sa.Engine:
            try:
                return open_database(url, create=create, stop=stop)
            except (*DATABASE_ERRORS, sqlite3.Error) as error:
                explained = explain(url, error)
                if stop is None or not is_outage(error) or is_wrong_input(error):
                    raise explained from error
                self.availability.note_outage(str(explained))
                raise OutageError(str(explained)) from error

        self.engine = self._until_it_answers(open_once)
        self.availability.note_answer(self.lease_seconds / 2)
        seconds = {
            "postgresql": "extract(epoch from clock_timestamp())::float8",
            "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
        }
        self.now: sa.ColumnElement[float] = sa.literal_column(seconds[self.engine.dialect.name], sa.Float)
        """The database's clock. People read it; no decision uses it, since it can be set."""

    @cached_property
    def optuna(self) -> optuna.storages.BaseStorage:
        """Optuna's storage: keeps finished trials in memory and hides foreign trials."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return OwnTrials(self.persist(lambda: optuna_storage(self.engine)))

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self.engine.dispose()

    def attempt(self, action: Callable[[], T]) -> T:
        """Run `action` once. Raises OutageError if the database is away; the action may be committed."""
        try:
            value = action()
        except DATABASE_ERRORS as error:
            explained = explain(self.url, error)
            if not is_outage(error):
                raise explained from error
            self.availability.note_outage(str(explained))
            self.engine.dispose()  # after a failover the address leads to another server
            raise OutageError(str(explained)) from error
        self.availability.note_answer(self.lease_seconds / 2)
        return value

    def persist(self, action: Callable[[], T]) -> T:
        """Run `action`, repeatedly while the database is away. It must be safe to run twice.

        Raises OutageError after `patience_seconds`, StoppedError when `stop` is set.
        """
        return self._until_it_answers(lambda: self.attempt(action))

    def _until_it_answers(self, action: Callable[[], T]) -> T:
        deadline = time.monotonic() + self.patience_seconds
        while True:
            try:
                return action()
            except StoppedError:
                raise
            except OutageError as error:
                if self.stop.wait(min(1.0, self.patience_seconds / 10)):
                    is_held = error.__cause__ is not None and is_locked(error.__cause__)
                    why = "another program has the database locked" if is_held else "the database is away"
                    raise StoppedError(f"told to stop while {why}. {error}") from error
                if time.monotonic() > deadline:
                    raise

    def read(self, action: Callable[[sa.Connection], T]) -> T:
        def once() -> T:
            with self.engine.connect() as connection:
                return action(connection)

        return self.persist(once)

    def write(self, action: Callable[[sa.Connection], T]) -> T:
        def once() -> T:
            with self.engine.begin() as connection:
                return action(connection)

        return self.persist(once)

    def exclusive(self) -> AbstractContextManager[sa.Connection]:
        return exclusive(self.engine, self.stop)

    # Studies

    def live_workers(
        self, connection: sa.Connection, *where: sa.ColumnElement[bool]
    ) -> dict[str, sa.Row[Any]]:
        """Return the rows of possibly live workers, by id. All other workers are proven dead.

        On this machine the process is the proof, elsewhere an unchanged row while this `Storage` watched for
        `lease_seconds`. So a worker elsewhere counts as alive in the first calls, however old its row is.
        """
        rows = connection.execute(sa.select(workers).where(workers.c.state == "live", *where)).all()
        return {row.id: row for row in rows if self._may_be_alive(row)}

    def _may_be_alive(self, row: sa.Row[Any]) -> bool:
        gap = self.lease_seconds / 2
        silent_seconds = self.availability.silent_seconds(row.id, str(row.last_seen), gap)
        running = is_running(row)
        return silent_seconds < self.lease_seconds if running is None else running

    def heard_workers(
        self, connection: sa.Connection, *where: sa.ColumnElement[bool]
    ) -> dict[str, sa.Row[Any]]:
        """Return the rows of workers with a fresh heartbeat by the database's clock, for people to read."""
        age = sa.func.abs(self.now - workers.c.last_seen) < self.lease_seconds
        query = sa.select(workers, age.label("is_fresh")).where(workers.c.state == "live", *where)
        rows = connection.execute(query).all()
        running = {row.id: is_running(row) for row in rows}
        return {row.id: row for row in rows if running[row.id] or (running[row.id] is None and row.is_fresh)}

    def watch_workers(self, *where: sa.ColumnElement[bool]) -> list[sa.Row[Any]]:
        """Watch workers until one proves to be alive or all are dead; return the live ones."""
        first: dict[str, float] = {}
        while live := self.read(lambda connection: self.live_workers(connection, *where)):
            for row in live.values():
                first.setdefault(row.id, row.last_seen)
            if alive := [row for row in live.values() if is_running(row) or row.last_seen != first[row.id]]:
                return alive
            if self.stop.wait(0.5):
                raise StoppedError("told to stop while it watched whether other workers are alive.")
        return []

    def stored(self, name: str, column: sa.Column[Any]) -> Any:
        """Return a column of the study in `hpo_studies`. Raises NoStudyError with the nearest name."""
        query = sa.select(column).where(studies.c.name == name)
        row = self.read(lambda connection: connection.execute(query).one_or_none())
        if row is None:
            names = self.read(lambda it: it.execute(sa.select(studies.c.name)).scalars().all())
            hint = did_you_mean(name, sorted(names)) if names else " It holds no study."
            raise NoStudyError(f"There is no study `{name}` in {redact(self.url)}.{hint}")
        return row[0]

    def studies(self, connection: sa.Connection, *where: sa.ColumnElement[bool]) -> list[sa.Row[Any]]:
        """Return the rows of `hpo_studies`, oldest first, without studies deleted from Optuna's tables."""
        query = sa.select(studies).where(_IN_OPTUNA, *where).order_by(studies.c.created, studies.c.name)
        return list(connection.execute(query))

    def has_study(self, name: str) -> bool:
        """Return true if the study exists, in Optuna's tables too."""
        return bool(self.read(lambda connection: self.studies(connection, studies.c.name == name)))

    def check_study(self, name: str) -> None:
        """Raise StorageError if the study does not exist, or the dashboard has deleted it."""
        self.stored(name, studies.c.name)
        if not self.has_study(name):
            raise StorageError(f"The study `{name}` in {redact(self.url)} was deleted; a run begins it anew.")

    def load_study(self, name: str) -> Study:
        """Load the study. Raises StorageError like `check_study`."""
        self.check_study(name)
        return self.persist(lambda: optuna.load_study(study_name=name, storage=self.optuna))

    def read_definition(self, name: str) -> dict[str, Any]:
        """Return the stored definition of the study. Raises StorageError if it does not exist."""
        return definition_of(name, self.stored(name, studies.c.definition))

    def study_token(self, name: str) -> str:
        """Return the token of this study, a part of folder names. Raises StorageError if it is damaged."""
        token = str(self.stored(name, studies.c.token))
        if not token.isalnum():
            raise StorageError(
                f"The token of the study `{name}` in {redact(self.url)} must be letters and digits."
            )
        return token

    def store_comparison(self, name: str, question: str, result: Mapping[str, Any]) -> None:
        key, value = f"{COMPARISON_ATTR}{question}", json_safe(result)
        self.persist(lambda: self.load_study(name).set_user_attr(key, value))

    def trial_counts(self, name: str) -> dict[str, int]:
        """Return `count_trials` of one study; zeros if it does not exist."""
        counts = self.read(lambda connection: count_trials(connection, studies.c.name == name))
        return counts.get(name) or {"open": 0, "running": 0, "done": 0}

    def is_finished(self, name: str) -> bool:
        """Return true if every trial of the study has ended."""
        counts = self.trial_counts(name)
        return counts["done"] == sum(counts.values())

    def other_workers_on(self, device: str | None = None) -> set[int]:
        """Return the other processes that work on this machine's `device`, in any study of this database.

        None: on any of its devices.
        """
        here = (workers.c.machine == this_machine(), workers.c.pid != os.getpid())
        there = [] if device is None else [sa.func.coalesce(workers.c.device, device) == device]
        return {row.pid for row in self.read(lambda it: self.live_workers(it, *here, *there)).values()}

    # Compatibility cache

    def get_compat(self, key: str) -> dict[str, Any] | None:
        query = sa.select(compat.c.result).where(compat.c.key == key)
        stored = self.read(lambda connection: connection.execute(query).scalar())
        return None if stored is None else dict(json.loads(stored))

    def put_compat(self, key: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Store a compatibility check unless another worker was first; return the stored one."""
        new = {"key": key, "result": json.dumps(json_safe(result)), "created": self.now}

        def insert() -> None:
            with suppress(IntegrityError), self.engine.begin() as connection:
                connection.execute(sa.insert(compat).values(new))

        self.persist(insert)
        stored = self.get_compat(key)
        assert stored is not None
        return stored
