"""The study in its database: its definition, its size, and what its trials store.

Optuna keeps the trials; tables of our own beside them (see `schema`) keep the definition, so that a changed
search space is refused before the first trial, the slots and workers (see `leases`), every evaluation, and
the compatibility checks that workers share. Little is written, because each call costs a commit: one JSON
attribute for the telemetry of a trial instead of thirty attributes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import optuna
import sqlalchemy as sa
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from hpo.config.study_config import check_study_name
from hpo.errors import OutageError, StoppedError, StorageError, StudyChangedError, did_you_mean
from hpo.json_safe import json_safe
from hpo.outcome import Outcome
from hpo.study import trial_rows
from hpo.study.availability import Availability
from hpo.study.database import exclusive, explain, is_outage, open_database, redact, snapshot
from hpo.study.process import is_alive, this_machine
from hpo.study.reader import COMPARISON_ATTR, read_study
from hpo.study.resize import resize_study
from hpo.study.schema import compat, detailed_evaluations, evaluations, slots, studies, workers
from hpo.study.study_record import StudyRecord
from hpo.study.trial_storage import TrialStorage

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.leases import Lease
    from hpo.study.outbox import Report

P = ParamSpec("P")
T = TypeVar("T")
_logger = logging.getLogger(__name__)

TOKEN_ATTR = "hpo:token"


def persistent(method: Callable[Concatenate[Storage, P], T]) -> Callable[Concatenate[Storage, P], T]:
    """Run a method of Storage by `Storage.persist`: again if the database was away meanwhile."""

    @wraps(method)
    def persisted(self: Storage, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.persist(lambda: method(self, *args, **kwargs))

    return persisted


def open_storage(url: str, *, create: bool = True, stop: threading.Event | None = None) -> Storage:
    """Connect to the study database at `url` and make its tables where they are missing.

    Args:
        create: False for commands that only read: an absent database is an error.
        stop: of a worker: it waits for a database that is away, until this is set.

    Raises:
        StorageError: the database cannot be used as it is named.
        RunError: it can, but not now; OutageError: it stayed away for `Storage.patience_seconds`.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend = open_database(url, create=create, stop=stop, patience_seconds=Storage.patience_seconds)
    return Storage(url, backend, stop)


class Storage:
    """An open study database."""

    lease_seconds = 60.0
    """A worker on another machine that was silent for so long is taken for dead."""
    patience_seconds = 3600.0
    """How long a call waits for a database that went away (restart, network). Evaluations of a running trial
    wait in its `outbox`, so this is about what a worker cannot go on without: a trial's begin and its end."""

    def __init__(
        self, url: str, backend: optuna.storages.RDBStorage, stop: threading.Event | None = None
    ) -> None:
        self.url = url
        self.engine: sa.Engine = backend.engine
        self.optuna = TrialStorage(backend)
        self.stop = stop or threading.Event()
        """Set when this process is told to stop: nothing waits for the database any more."""
        self.availability = Availability()
        self._data: dict[str, str] = {}  # study -> fingerprint of the data that this process has
        seconds, started = (
            (
                "extract(epoch from clock_timestamp())::float8",
                "extract(epoch from pg_postmaster_start_time())::float8",
            )
            if self.engine.dialect.name == "postgresql"
            else ("(julianday('now') - 2440587.5) * 86400.0", "0.0")
        )
        # The database's clock: those of the workers' machines may differ.
        self.now: sa.ColumnElement[float] = sa.literal_column(seconds, sa.Float)
        database_start: sa.ColumnElement[float] = sa.literal_column(started, sa.Float)
        self.clock = (self.now.label("now"), database_start.label("database_start"))

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self.engine.dispose()

    def attempt(self, action: Callable[[], T]) -> T:
        """Run `action`.

        Raises:
            OutageError: the database is away; `action` may have been committed all the same.
        """
        try:
            value = action()
        except (SQLAlchemyError, StorageInternalError) as error:
            explained = explain(self.url, error)
            if not is_outage(error):
                raise explained from error
            self.availability.note_outage(str(explained))
            self.engine.dispose()  # after a failover the address leads to another server
            raise OutageError(str(explained)) from error
        self.availability.note_answer(self.lease_seconds / 2)
        return value

    def persist(self, action: Callable[[], T]) -> T:
        """Run `action`, again while the database is away: it must bear being run twice.

        Raises:
            OutageError: the database stayed away for `patience_seconds`; StoppedError when `stop` is set.
        """
        deadline = time.monotonic() + self.patience_seconds
        while True:
            try:
                return self.attempt(action)
            except OutageError as error:
                if self.stop.wait(min(1.0, self.patience_seconds / 10)):
                    raise StoppedError(f"told to stop while the database is away. {error}") from error
                if time.monotonic() > deadline:
                    raise

    # Studies

    @persistent
    def create_or_resume_study(self, config: StudyConfig, *, resize: bool = True) -> optuna.Study:
        """Return the study of `config`, made if it is not there, with one slot for each of `n_trials`.

        A stored study of another definition is replaced, with a warning in the log, if no trial of it has
        trained and no worker is in it.

        Args:
            resize: False for a worker that joins: it neither changes the stored `n_trials` nor replaces.

        Raises:
            StudyChangedError: the stored study was made with another search space or definition.
        """
        with exclusive(self.engine):
            try:
                return self._create_or_resume(config, resize)
            except StudyChangedError:
                if not resize or self._is_in_use(config.name):
                    raise
            optuna.delete_study(study_name=config.name, storage=self.optuna)
            _logger.warning(
                "The stored study `%s` had another definition, but no trial of it had trained: "
                "it is replaced.",
                config.name,
            )
            return self._create_or_resume(config, resize)

    def _create_or_resume(self, config: StudyConfig, resize: bool) -> optuna.Study:
        study = optuna.create_study(
            study_name=config.name,
            storage=self.optuna,
            directions=[objective.direction for objective in config.objective],
            load_if_exists=True,
        )
        token = self._token(config.name)
        with self.engine.begin() as connection:
            row = connection.execute(sa.select(studies).where(studies.c.name == config.name)).one_or_none()
            if row is not None and row.token != token:
                # The Optuna study was deleted (the dashboard can), and this is a new one of that name.
                connection.execute(sa.delete(studies).where(studies.c.name == config.name))
                for table in (slots, evaluations, detailed_evaluations):
                    connection.execute(sa.delete(table).where(table.c.study == config.name))
                row = None
            if row is None:
                if token is None and study.get_trials(deepcopy=False):
                    raise StorageError(
                        f"The study `{config.name}` in {redact(self.url)} was not made by hpo. "
                        "Give yours another `name`, or use another database."
                    )
                token = uuid.uuid4().hex
                values = {**_definition(config), "name": config.name, "token": token, "created": self.now}
                connection.execute(sa.insert(studies).values(values))
            else:
                completed = config.completed(json.loads(row.definition))
                values = _definition(completed) if resize else {"n_trials": row.n_trials}
                # Also where nothing changes: from here on nobody else writes to a SQLite file.
                connection.execute(sa.update(studies).where(studies.c.name == config.name).values(values))
            live = self.live_workers(connection, config.name)
            dropped = resize_study(connection, config.name, values["n_trials"], live)
        if row is None:
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                study.set_metric_names([objective.metric for objective in config.objective])
            # Last: a study without its token was not made to the end, and the next run begins it anew.
            self.optuna.set_study_system_attr(study._study_id, TOKEN_ATTR, token)
        for trial in study.get_trials(deepcopy=False) if dropped else ():
            if trial.number in dropped and not trial.state.is_finished():
                reason = f"n_trials was lowered to {values['n_trials']}"
                self.fail_trial(trial, Outcome.PREEMPTED, reason)
        return study

    def _is_in_use(self, name: str) -> bool:
        """Whether a trial of the study has trained, or a worker is in it."""
        steps = sa.select(evaluations.c.step).where(evaluations.c.study == name).limit(1)
        trained = sa.select(slots.c.slot).where(slots.c.study == name, slots.c.trained).limit(1)
        with self.engine.connect() as connection:
            if connection.execute(steps).first() or connection.execute(trained).first():
                return True
            return bool(self.live_workers(connection, name))

    def live_workers(
        self, connection: sa.Connection, name: str, witnessed_seconds: float = math.inf
    ) -> set[str]:
        """Return the names of the workers of a study whose processes live (see `process.is_alive`)."""
        members = sa.select(workers, *self.clock).where(workers.c.study == name)
        rows = connection.execute(members.where(workers.c.state == "live"))
        return {row.id for row in rows if is_alive(row, self.lease_seconds, witnessed_seconds)}

    def fail_trial(self, trial: FrozenTrial, outcome: Outcome, reason: str) -> None:
        """End a trial that no worker has, as FAIL, which samplers do not see."""
        with self.engine.begin() as connection:
            attributes = {"outcome": outcome, "outcome_reason": reason}
            if trial_rows.end_trial(connection, trial._trial_id, TrialState.FAIL, None):
                table = trial_rows.user_attributes
                trial_rows.write_attributes(connection, table, trial._trial_id, attributes)

    @persistent
    def _stored(self, name: str, column: sa.Column[Any]) -> Any:
        """Return the value of a column of `hpo_studies`.

        Raises:
            StorageError: there is no such study; the message names the nearest.
        """
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(column).where(studies.c.name == name)).one_or_none()
            names = list(connection.execute(sa.select(studies.c.name)).scalars()) if row is None else []
        if row is None:
            hint = did_you_mean(name, sorted(names)) if names else " It holds no study."
            raise StorageError(f"There is no study `{name}` in {redact(self.url)}.{hint}")
        return row[0]

    def _token(self, name: str) -> str | None:
        """What tells the Optuna study `name` from a deleted one; None: it was not made to the end by hpo."""
        study_id = self.optuna.get_study_id_from_name(name)
        token: str | None = self.optuna.get_study_system_attrs(study_id).get(TOKEN_ATTR)
        return token

    @persistent
    def has_study(self, name: str) -> bool:
        """Whether there is a study `name`; one whose Optuna study was deleted is none."""
        with self.engine.connect() as connection:
            query = sa.select(studies.c.token).where(studies.c.name == name)
            token = connection.execute(query).scalar_one_or_none()
        try:
            return token is not None and token == self._token(name)
        except KeyError:
            return False

    @persistent
    def load_study(self, name: str) -> optuna.Study:
        """Return the stored study `name`, for reading.

        Raises:
            StorageError: there is none; the message names the nearest.
        """
        self._stored(name, studies.c.name)
        return optuna.load_study(study_name=name, storage=self.optuna)

    def read_definition(self, name: str) -> dict[str, Any]:
        """Return the definition of the study, as it is stored.

        Raises StorageError where there is no such study.
        """
        stored: dict[str, Any] = json.loads(self._stored(name, studies.c.definition))
        return stored

    def study_token(self, name: str) -> str:
        """Return what tells this study from a deleted one of the same name; part of folders' names.

        Raises StorageError where there is no such study, or it is not one that hpo makes.
        """
        token = str(self._stored(name, studies.c.token))
        if not token.isalnum():
            raise StorageError(
                f"The token of the study `{name}` in {redact(self.url)} must be letters and digits."
            )
        return token

    @persistent
    def bind_data(self, name: str, fingerprint: str) -> None:
        """Note which data the study `name` is made with; workers of this process train with them.

        The data's path is part of the definition, but a file may be edited in its place. Other data are
        taken as long as no trial has trained and no worker is in the study.

        Raises:
            StudyChangedError: the study was made with data of another fingerprint.
            StorageError: there is no such study.
        """
        with exclusive(self.engine):
            if self._stored(name, studies.c.data) is None or not self._is_in_use(name):
                with self.engine.begin() as connection:
                    study = sa.update(studies).where(studies.c.name == name)
                    connection.execute(study.values(data=fingerprint))
        self.check_data(name, fingerprint)
        self._data[name] = fingerprint

    def check_data(self, name: str, fingerprint: str | None = None) -> None:
        """Check data against those that the study is bound to.

        Without a `fingerprint`, those that this process gave to `bind_data`, if any.

        Raises:
            StudyChangedError: the study was made with data of another fingerprint.
        """
        fingerprint = fingerprint or self._data.get(name)
        if fingerprint is not None and self._stored(name, studies.c.data) not in (None, fingerprint):
            raise StudyChangedError(
                f"The data of the study `{name}` have changed since it was made, though they lie where they "
                "lay, so its results would not compare. Restore them, or give the study another `name`."
            )

    @persistent
    def read_study(self, name: str) -> StudyRecord:
        """Read everything stored about the study `name`. Raises StorageError where there is none."""
        check_study_name(name)  # of the folder for its report, too
        self._stored(name, studies.c.name)
        if not self.has_study(name):
            raise StorageError(f"The study `{name}` in {redact(self.url)} was deleted; a run begins it anew.")
        study_id = self.optuna.get_study_id_from_name(name)
        with snapshot(self.engine) as connection:
            return read_study(connection, study_id, name, self.clock, self.lease_seconds)

    @persistent
    def store_comparison(self, name: str, question: str, result: Mapping[str, Any]) -> None:
        """Keep with the study `name` what a comparison of it has found; see `StudyRecord.comparisons`."""
        self.load_study(name).set_user_attr(f"{COMPARISON_ATTR}{question}", json_safe(result))

    @persistent
    def slot_counts(self, name: str) -> dict[str, int]:
        """Return how many slots of the study are `open`, `running` (its worker may be gone) and `done`."""
        query = sa.select(slots.c.state, sa.func.count()).where(slots.c.study == name)
        with self.engine.connect() as connection:
            found = {row[0]: int(row[1]) for row in connection.execute(query.group_by(slots.c.state))}
        return {state: found.get(state, 0) for state in ("open", "running", "done")}

    @persistent
    def has_other_workers_on(self, device: str | None = None) -> bool:
        """Whether another process works on any study of this database on this machine's `device` (None: any).

        The device is a `DeviceInfo.device_id`. A worker that did not say where it runs counts.
        """
        here = (workers.c.machine == this_machine(), workers.c.state == "live", workers.c.pid != os.getpid())
        there = sa.true() if device is None else sa.func.coalesce(workers.c.device, device) == device
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(workers, *self.clock).where(*here, there)).all()
        return any(is_alive(row, self.lease_seconds) for row in rows)

    # What a trial stores

    def report_evaluation(
        self, trial: optuna.trial.Trial, lease: Lease, report: Report, *, if_missing: bool = False
    ) -> bool:
        """Store one evaluation and return whether the pruner would stop the trial.

        Those of this step and later ones go: a worker that died made them, after the checkpoint from which
        the trial went on. To be called by `attempt` or `persist`; a second call changes nothing.

        Args:
            if_missing: only if there is none of this step yet; no other goes, and no pruner is asked.

        Raises:
            LeaseLostError: another worker has the trial; nothing is stored.
        """
        row = json_safe(asdict(report.row))
        key = {"study": trial.study.study_name, "trial_number": trial.number}
        of_trial = [evaluations.c[column] == value for column, value in key.items()]
        single = len(trial.study.directions) == 1
        value = report.value if single and math.isfinite(report.value or 0.0) else None
        with self.engine.begin() as connection:
            lease.hold(connection)
            if if_missing:
                same = sa.select(evaluations.c.step).where(*of_trial, evaluations.c.step == row["step"])
                if connection.execute(same).first():
                    return False
            else:
                connection.execute(sa.delete(evaluations).where(*of_trial, evaluations.c.step >= row["step"]))
            numerics = None if row["numerics"] is None else json.dumps(row["numerics"])
            values = {**row, **key, "metrics": json.dumps(row["metrics"]), "numerics": numerics}
            connection.execute(sa.insert(evaluations).values(values))
            if value is not None:
                trial_rows.write_intermediate_value(connection, trial._trial_id, report.index, value)
        if value is not None:
            trial._cached_frozen_trial.intermediate_values[report.index] = value
        return single and not if_missing and trial.should_prune()

    # Compatibility cache

    @persistent
    def get_compat(self, key: str) -> dict[str, Any] | None:
        """Return the result of the compatibility check stored under `key`, if there is one."""
        with self.engine.connect() as connection:
            found = connection.execute(sa.select(compat.c.result).where(compat.c.key == key)).scalar()
        return None if found is None else dict(json.loads(found))

    @persistent
    def put_compat(self, key: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Store a result unless another worker was first; return the one that is stored."""
        values = {"key": key, "result": json.dumps(json_safe(result)), "created": self.now}
        with suppress(IntegrityError), self.engine.begin() as connection:
            connection.execute(sa.insert(compat).values(values))
        stored = self.get_compat(key)
        assert stored is not None
        return stored


def _definition(config: StudyConfig) -> dict[str, Any]:
    """The columns of `hpo_studies` that say what the study is."""
    definition = json.dumps(config.definition(), sort_keys=True)
    columns = {"space_hash": config.space_hash, "n_trials": config.num_slots, "priority": config.priority}
    return columns | {"definition": definition}
