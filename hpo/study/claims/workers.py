"""Membership of a worker in a study: its row in the database, and a thread with its heartbeats."""

import json
import logging
import os
import socket
import threading
import uuid
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Self

import optuna
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from hpo.errors import HpoError, OutageError, StoppedError, StorageError
from hpo.json_safe import json_safe
from hpo.study.claims.lease import Lease
from hpo.study.claims.snapshot import EVERYTHING, Runnable
from hpo.study.store.database import ADVICE
from hpo.study.store.failures import explain
from hpo.study.store.lifecycle import study_state
from hpo.study.store.process import process_start, this_job, this_machine
from hpo.study.store.schema import claims, workers
from hpo.study.store.storage import Storage

BEAT_SECONDS = 2.0  # time between two heartbeats, which also report the trial's progress

_logger = logging.getLogger(__name__)


def refuse_other_hosts(storage: Storage) -> None:
    """Raise StorageError for a worker that joins a SQLite database in use by another host.

    It waits for a lease if workers of another host vanished. Containers of one host share its kernel, which
    keeps the locks, so they are no other hosts. Neither is this host before its last boot.
    """
    if storage.engine.dialect.name != "sqlite":
        return
    boot = this_machine().rsplit("/", 2)[1]
    elsewhere = (workers.c.machine.not_like(f"%/{boot}/%"), workers.c.host != socket.gethostname())
    if rows := storage.watch_workers(*elsewhere):
        hosts = ", ".join(sorted({row.host for row in rows}))
        raise StorageError(
            f"A SQLite database must be used by one host at a time, but workers on {hosts} have this one "
            f"open. {ADVICE}"
        )


@dataclass(eq=False)
class Membership:
    """This process as a worker of a study, for the length of a block."""

    _storage: Storage
    _study: optuna.Study
    _: KW_ONLY
    device: str | None = None  # `DeviceInfo.device_id` of its device, if known
    runnable: Runnable = EVERYTHING  # trials that it can run

    number: int = field(init=False)  # number of the worker in the study, from 0; unique for ever

    def __post_init__(self) -> None:
        self._name = self._study.study_name
        self.host = socket.gethostname()
        self.id = f"{self.host[:100]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.study_closed = threading.Event()  # set if the study was paused, cancelled or deleted
        self._lease: Lease | None = None
        self.token = self._storage.study_token(self._name)
        self._of_study = claims.c.study == self._name
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        refuse_other_hosts(self._storage)
        self._storage.persist(self._register)
        self._thread.start()
        return self

    def _register(self) -> None:
        storage, name = self._storage, self._name
        with storage.exclusive() as connection:
            # An existing row is of a committed attempt whose answer was lost.
            connection.execute(sa.delete(workers).where(workers.c.id == self.id))
            numbers = sa.select(sa.func.max(workers.c.number)).where(workers.c.study == name)
            last: int | None = connection.execute(numbers).scalar()
            self.number = 0 if last is None else last + 1
            left_out = json.dumps(sorted(self.runnable.left_out))
            me = {"id": self.id, "study": name, "number": self.number, "state": "live", "left_out": left_out}
            me |= {"host": self.host, "machine": this_machine(), "device": self.device, "job": this_job()}
            me |= {"pid": os.getpid(), "process_start": process_start(os.getpid()) or ""}
            me |= {"started": storage.now, "last_seen": storage.now}
            connection.execute(sa.insert(workers).values(me))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leaving.set()
        if kind is not None and issubclass(kind, StoppedError):
            return  # no time to wait for the database; the others see that this process is gone
        self._thread.join()
        me = sa.update(workers).where(workers.c.id == self.id)
        try:
            with self._storage.engine.begin() as connection:
                self._renew_claim(connection)
                mine = (self._of_study, claims.c.owner == self.id)
                connection.execute(sa.update(claims).where(*mine).values(owner=None))
                connection.execute(me.values(state="left", last_seen=self._storage.now))
        except SQLAlchemyError as error:  # the others see that this process is gone
            _logger.warning("Could not sign off: %s", explain(self._storage.url, error))

    def _beat(self) -> None:
        while not self._leaving.wait(min(BEAT_SECONDS, self._storage.lease_seconds / 6)):
            try:
                self._storage.attempt(self._beat_once)
            except OutageError:
                pass  # the next one finds the database back
            except HpoError as error:
                _logger.warning("Heartbeat failed, trying again: %s", error)

    def _beat_once(self) -> None:
        me = sa.update(workers).where(workers.c.id == self.id)
        with self._storage.engine.begin() as connection:
            progress = self._renew_claim(connection)
            self._is_study_open(connection)
            # The worker's row is locked last everywhere, so two threads never wait for each other.
            renewed = connection.execute(me.values(last_seen=self._storage.now, progress=progress))
        if not (renewed.rowcount or self.study_closed.is_set()):
            self._register()  # for example after a failover to an older state

    def _renew_claim(self, connection: sa.Connection) -> str | None:
        lease = self._lease
        if lease is None:
            return None
        if lease.budget is not None:
            lease.clock.num_sharing = self._num_sharing(connection)
        if not lease.update(connection):
            lease.lost.set()
        if lease.progress is None:
            return None
        return json.dumps(json_safe({**asdict(lease.progress), "trial": lease.number}))

    def _num_sharing(self, connection: sa.Connection) -> int:
        if self.device is None:
            return 1
        here = (workers.c.machine == this_machine(), workers.c.device == self.device)
        has_trial = sa.exists().where(claims.c.owner == workers.c.id)
        return max(1, len(self._storage.live_workers(connection, *here, has_trial)))

    def _is_study_open(self, connection: sa.Connection) -> bool:
        """Return true if the study is open; otherwise set `study_closed`."""
        if study_state(connection, self._name, self.token) != "open":
            self.study_closed.set()
        return not self.study_closed.is_set()
