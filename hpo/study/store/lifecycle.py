"""States of a study: open, paused, cancelled, deleted.

Workers read the state with each heartbeat and each claim. In a study that is not open they checkpoint their
trials, release them as `preempted` and leave. A paused study continues when it is open again. The unfinished
trials of a cancelled study end, by the last worker to leave or by the command.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from optuna.trial import TrialState
from pydantic import ValidationError

from hpo.config.allowed import check_allowed, checkpoint_path
from hpo.config.sections import CheckpointConfig
from hpo.config.study_file import check_study_name, show
from hpo.errors import RunError, StorageError, printable
from hpo.study.store import optuna_internals
from hpo.study.store.foreign import in_state, is_foreign
from hpo.study.store.opening import exclusive
from hpo.study.store.optuna_internals import delete_study_rows
from hpo.study.store.schema import claims, delete_rows, studies, workers
from hpo.study.store.storage import Storage, is_stored, num_open

StudyState = Literal["open", "paused", "cancelled"]


def study_state(connection: sa.Connection, name: str, token: str | None = None) -> str | None:
    """Return the state of the study, or None if it does not exist or has another `token`."""
    this = studies.c.name == name if token is None else is_stored(name, token)
    query = sa.select(studies.c.state).where(studies.c.name == name, this)
    return connection.execute(query).scalar()


def read_state(storage: Storage, name: str) -> str | None:
    return storage.read(lambda connection: study_state(connection, name))


def enqueued(connection: sa.Connection, name: str) -> tuple[int, int]:
    """Return the number of enqueued trials, and the number of trials that may still begin."""
    trials, made = optuna_internals.trials, optuna_internals.studies
    has_claim = sa.exists().where(claims.c.study == name, claims.c.trial_number == trials.c.number)
    waiting = sa.select(sa.func.count()).select_from(trials.join(made)).where(made.c.study_name == name)
    waiting = waiting.where(trials.c.state == TrialState.WAITING, ~has_claim)
    return int(connection.execute(waiting).scalar_one()), max(0, num_open(connection, name))


def add_trial(connection: sa.Connection, name: str) -> None:
    """Raise the `n_trials` of a study by 1."""
    number = {"n_trials": studies.c.n_trials + 1}
    connection.execute(sa.update(studies).where(studies.c.name == name).values(number))


def has_complete(connection: sa.Connection, name: str) -> bool:
    complete = in_state(name, TrialState.COMPLETE).where(~is_foreign(name))
    return connection.execute(complete.limit(1)).first() is not None


def is_in_work(storage: Storage, name: str) -> bool:
    """Return true if the study is open and has an unfinished trial."""
    return read_state(storage, name) == "open" and not storage.is_finished(name)


def set_state(storage: Storage, name: str, state: StudyState) -> str:
    """Open, pause or cancel a study and return its earlier state. Raises NoStudyError."""
    storage.study_token(name)  # the message names the nearest

    def change(connection: sa.Connection) -> str | None:
        before = study_state(connection, name)
        connection.execute(sa.update(studies).where(studies.c.name == name).values(state=state))
        return before

    return storage.write(change) or state


def wait_for_workers(storage: Storage, name: str, seconds: float) -> list[str]:
    """Wait until no worker is in the study, but not longer than `seconds`; return the remaining processes."""
    deadline = time.monotonic() + seconds
    while left := storage.read(lambda connection: _processes(storage, connection, name)):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.5)
    return left


def processes(rows: Iterable[Any]) -> list[str]:
    return sorted(f"process {row.pid} on {printable(row.host)}" for row in rows)


def _processes(storage: Storage, connection: sa.Connection, name: str) -> list[str]:
    return processes(storage.live_workers(connection, workers.c.study == name).values())


def delete_study(storage: Storage, name: str) -> None:
    """Remove all rows of a study, Optuna's and ours. Raises RunError if workers are in the study."""
    storage.watch_workers(workers.c.study == name)

    def delete() -> None:
        with exclusive(storage.engine) as connection:  # nobody joins meanwhile
            if left := _processes(storage, connection, name):
                raise RunError(f"The study `{name}` must have no worker, but has {', '.join(left)}.")
            delete_study_rows(connection, name)
            delete_rows(connection, name)

    storage.persist(delete)


def checkpoints_folder(storage: Storage, name: str, runs_dir: Path) -> Path:
    """Return the folder of a study's checkpoints. Raises StorageError, or InputError if it is not allowed."""
    check_study_name(name)
    stored = checkpoint_config(name, storage.read_definition(name))
    check_allowed(name, checkpoint_path(stored))
    return stored.folder_of(name, storage.study_token(name), runs_dir)


def checkpoint_config(name: str, definition: Mapping[str, Any]) -> CheckpointConfig:
    """Return the section `checkpoint` of a stored study. Raises StorageError if it is damaged."""
    try:
        return CheckpointConfig.model_validate(definition.get("checkpoint", {}))
    except ValidationError as error:
        raise StorageError(f"The database's `checkpoint` of the study {show(name)}: {error}") from None
