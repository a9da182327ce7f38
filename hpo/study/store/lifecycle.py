"""The life of a study in its database: open, paused, cancelled, deleted.

Workers read the state with each heartbeat and each claim. In a study that is not open they checkpoint their
trials, give them back as `preempted` and leave; no slot of it is claimed. A paused study goes on where it was
when it is open again. The unfinished trials of a cancelled study end, by the last worker to leave or by the
command; opened again, it begins their slots anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa
from optuna.trial import TrialState
from pydantic import ValidationError

from hpo.config.allowed import check_allowed, checkpoint_place
from hpo.config.checkpoint_config import CheckpointConfig
from hpo.config.study_config import check_study_name
from hpo.config.study_file import show
from hpo.errors import RunError, StorageError, printable
from hpo.outcome import Outcome
from hpo.study.store import optuna_internals
from hpo.study.store.lock import exclusive
from hpo.study.store.optuna_internals import delete_study_rows
from hpo.study.store.schema import NO_PROGRESS, delete_rows, slots, studies, workers

if TYPE_CHECKING:
    from hpo.study.store.storage import Storage

StudyState = Literal["open", "paused", "cancelled"]

_FRESH = {
    "state": "open",
    "trial_number": None,
    "owner": None,  # who had it and was silent for long stores nothing when it comes back
    **NO_PROGRESS,
}


def study_state(connection: sa.Connection, name: str) -> str | None:
    """The state of the study; None: there is none of that name."""
    return connection.execute(sa.select(studies.c.state).where(studies.c.name == name)).scalar()


def read_state(storage: Storage, name: str) -> str | None:
    """As `study_state`, in a transaction of its own."""
    return storage.read(lambda connection: study_state(connection, name))


def enqueued(connection: sa.Connection, name: str) -> tuple[int, int]:
    """How many trials of the study wait for a slot, and how many of its slots have had none yet."""
    trials, made = optuna_internals.trials, optuna_internals.studies
    waiting = sa.select(sa.func.count()).select_from(trials.join(made)).where(made.c.study_name == name)
    waiting = waiting.where(trials.c.state == TrialState.WAITING)
    fresh = sa.select(sa.func.count()).where(
        slots.c.study == name, slots.c.state == "open", slots.c.trial_number.is_(None)
    )
    return int(connection.execute(waiting).scalar_one()), int(connection.execute(fresh).scalar_one())


def is_in_work(storage: Storage, name: str) -> bool:
    """Whether the study is open and has an unfinished trial; to be called by `attempt` or `persist`."""
    unfinished = sa.select(slots.c.slot).where(slots.c.study == name, slots.c.state != "done").limit(1)
    with storage.engine.connect() as connection:
        is_open = study_state(connection, name) == "open"
        return is_open and connection.execute(unfinished).first() is not None


def set_state(storage: Storage, name: str, state: StudyState) -> str:
    """Open, pause or cancel a study and return the state that it had.

    Raises StorageError where there is no such study.
    """
    storage.study_token(name)  # the message names the nearest

    def change(connection: sa.Connection) -> str | None:
        before = study_state(connection, name)
        connection.execute(sa.update(studies).where(studies.c.name == name).values(state=state))
        return before

    return storage.write(change) or state


def wait_for_workers(storage: Storage, name: str, seconds: float) -> list[str]:
    """Wait until no worker is in the study; return where those are that still are after so many `seconds`."""
    deadline = time.monotonic() + seconds
    while left := storage.read(lambda connection: _processes(storage, connection, name)):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.5)
    return left


def processes(rows: Iterable[Any]) -> list[str]:
    """Return where the workers of these rows are, in words."""
    return sorted(f"process {row.pid} on {printable(row.host)}" for row in rows)


def _processes(storage: Storage, connection: sa.Connection, name: str) -> list[str]:
    return processes(storage.live_workers(connection, workers.c.study == name).values())


def end_unfinished(storage: Storage, name: str) -> int:
    """End the unfinished trials of a cancelled study that no worker has; return how many.

    They are `preempted`, FAIL to Optuna, as those of slots that a lower `n_trials` drops.
    """

    def begin_anew(connection: sa.Connection) -> set[int | None]:
        # Written first, so that nobody opens the study or claims a slot meanwhile.
        cancelled = sa.update(studies).where(studies.c.name == name, studies.c.state == "cancelled")
        if not connection.execute(cancelled.values(state="cancelled")).rowcount:
            return set()
        alive = storage.live_workers(connection, workers.c.study == name)
        has_no_worker = sa.or_(slots.c.state == "open", slots.c.owner.not_in(alive))
        is_unfinished = slots.c.state.in_(("open", "running"))  # one that has paused has ended, and may go on
        unfinished = (slots.c.study == name, is_unfinished, slots.c.trial_number.is_not(None))
        query = sa.select(slots.c.trial_number).where(*unfinished, has_no_worker)
        numbers = set(connection.execute(query).scalars())
        connection.execute(sa.update(slots).where(*unfinished, has_no_worker).values(_FRESH))
        return numbers

    numbers = storage.write(begin_anew)
    if not numbers:
        return 0
    trials = storage.load_study(name).get_trials(deepcopy=False)
    unfinished = [trial for trial in trials if trial.number in numbers and not trial.state.is_finished()]
    for trial in unfinished:
        storage.fail_trial(trial, Outcome.PREEMPTED, "the study was cancelled")
    return len(unfinished)


def delete_study(storage: Storage, name: str) -> None:
    """Remove all rows of a study, Optuna's and ours, also those of one that the dashboard has deleted.

    Raises RunError where workers are in the study.
    """
    storage.watch_workers(workers.c.study == name)

    def delete() -> None:
        with exclusive(storage.engine) as connection:  # nobody joins meanwhile
            if left := _processes(storage, connection, name):
                raise RunError(f"The study `{name}` must have no worker, but has {', '.join(left)}.")
            delete_study_rows(connection, name)
            delete_rows(connection, name)

    storage.persist(delete)


def checkpoints_folder(storage: Storage, name: str, runs_dir: Path) -> Path:
    """Return the folder of a study's checkpoints: the shared one of the study, or one on this machine.

    Raises StorageError if the stored study is damaged, and InputError if this machine does not allow the
    place.
    """
    check_study_name(name)
    stored = checkpoint_config(name, storage.read_definition(name))
    check_allowed(name, checkpoint_place(stored))
    return stored.folder_of(name, storage.study_token(name), runs_dir)


def checkpoint_config(name: str, definition: Mapping[str, Any]) -> CheckpointConfig:
    """The section `checkpoint` of a stored study, whatever its others hold. Raises StorageError."""
    try:
        return CheckpointConfig.model_validate(definition.get("checkpoint", {}))
    except ValidationError as error:
        raise StorageError(f"The database's `checkpoint` of the study {show(name)}: {error}") from None
