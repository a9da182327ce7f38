"""A worker among the workers of a study: its row says that it lives, and a thread keeps that fresh."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Self

import optuna
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from hpo.errors import HpoError, OutageError, StoppedError
from hpo.study.database import exclusive, explain
from hpo.study.deaths import num_oom_kills
from hpo.study.lifecycle import study_state
from hpo.study.process import process_start, this_job, this_machine
from hpo.study.schema import slots, workers
from hpo.study.sqlite_place import refuse_other_hosts
from hpo.study.storage import Storage

if TYPE_CHECKING:
    from hpo.study.leases import Lease

_logger = logging.getLogger(__name__)


def new_worker_id() -> str:
    """Name this process as a worker, once; a row in `hpo_workers` has it."""
    return f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def add_worker(
    storage: Storage, connection: sa.Connection, study: str, worker_id: str, device: str | None
) -> int:
    """Insert this process into `hpo_workers` and return its number; to be called under `exclusive`.

    A row `worker_id` that is there is of an attempt that was committed though the connection broke before
    the answer, and is replaced.
    """
    connection.execute(sa.delete(workers).where(workers.c.id == worker_id))
    numbers = sa.select(sa.func.max(workers.c.number)).where(workers.c.study == study)
    last: int | None = connection.execute(numbers).scalar()
    number = 0 if last is None else last + 1
    connection.execute(
        sa.insert(workers).values(
            id=worker_id,
            study=study,
            host=socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()) or "",
            device=device,
            started=storage.now,
            last_seen=storage.now,
            oom_kills=num_oom_kills(),
            state="live",
            number=number,
            job=this_job(),
        )
    )
    return number


@dataclass(eq=False)
class Membership:
    """This process in a study, for the length of a block."""

    _storage: Storage
    _study: optuna.Study
    _: KW_ONLY
    device: str | None = None
    """The `DeviceInfo.device_id` of what its trials run on, where known."""
    reservation: str = ""
    """The row of `hpo_workers` that has stood for this worker, to be replaced by its own."""

    number: int = field(init=False)
    """Of the worker in the study, from 0; no other worker of the study ever has it."""

    def __post_init__(self) -> None:
        self.id = new_worker_id()
        self.halted = threading.Event()
        """Set when the study was paused, cancelled or deleted."""
        self._of_study = slots.c.study == self._study.study_name
        self._lease: Lease | None = None
        """Of the slot that it has claimed last."""
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._storage.persist(self._register)
        self._thread.start()
        return self

    def _register(self) -> None:
        """Add this worker's row, with the next number; the data cannot be exchanged at the same time."""
        storage, name = self._storage, self._study.study_name
        with exclusive(storage.engine):
            storage.check_data(name)
            with storage.engine.begin() as connection:
                refuse_other_hosts(connection, storage.now, storage.lease_seconds)
                connection.execute(sa.delete(workers).where(workers.c.id.in_((self.id, self.reservation))))
                self._alive_at_start = storage.live_workers(connection, name)
                self.number = add_worker(storage, connection, name, self.id, self.device)

    def others_run(self) -> bool:
        """Whether another worker that lives is running a trial of the study."""
        running = sa.select(slots.c.owner).where(self._of_study, slots.c.state == "running")
        with self._storage.engine.connect() as connection:
            owners = set(connection.execute(running).scalars())
            return bool(owners & self._storage.live_workers(connection, self._study.study_name) - {self.id})

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leaving.set()
        if kind is not None and issubclass(kind, StoppedError):
            return  # no time to wait for a database that is away; the others see that this process is gone
        self._thread.join()
        mine = (self._of_study, slots.c.owner == self.id, slots.c.state == "running")
        me = sa.update(workers).where(workers.c.id == self.id)
        progress = self._lease.progress if self._lease else {}
        try:
            with self._storage.engine.begin() as connection:
                connection.execute(sa.update(slots).where(*mine).values(state="open", **progress))
                connection.execute(me.values(state="left", last_seen=self._storage.now))
        except SQLAlchemyError as error:  # the others see that this process is gone
            _logger.warning("Could not sign off: %s", explain(self._storage.url, error))

    def _beat(self) -> None:
        while not self._leaving.wait(self._storage.lease_seconds / 6):
            try:
                self._storage.attempt(self._beat_once)
            except OutageError:
                pass  # the next one finds the database back
            except HpoError as error:
                _logger.warning("Heartbeat failed, trying again: %s", error)

    def _beat_once(self) -> None:
        lease = self._lease
        with self._storage.engine.begin() as connection:
            if lease is not None and not lease.update(connection, slots.c.state == "running"):
                lease.lost.set()
            self._look_whether_open(connection)
            # Last, as everywhere: two threads never wait for each other's rows.
            is_known = self._renew(connection)
        if not (is_known or self.halted.is_set()):  # after a failover to a server that lagged behind, say
            self._register()

    def _renew(self, connection: sa.Connection) -> bool:
        """Say that this worker lives; False: its row is gone."""
        me = sa.update(workers).where(workers.c.id == self.id)
        renewed = connection.execute(me.values(last_seen=self._storage.now, oom_kills=num_oom_kills()))
        return renewed.rowcount > 0

    def _look_whether_open(self, connection: sa.Connection) -> bool:
        """Whether the study is open; where it is not, `halted` is set."""
        if study_state(connection, self._study.study_name) != "open":
            self.halted.set()
        return not self.halted.is_set()
