"""A lock that one process at a time has, of all that use a database.

Optuna crashes when several processes make its tables at once, and numbers of workers are given one by one.
PostgreSQL has such locks; beside a SQLite file there is a file that the kernel locks. A process that has the
lock and is stopped (SIGSTOP, a machine that sleeps) loses it after `LOCK_SECONDS`, less than a lease.
"""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import sqlalchemy as sa

from hpo.errors import OutageError, StoppedError, StorageError
from hpo.study.store.database import sqlite_path

LOCK_SECONDS = 45.0
_POSTGRES_LOCK = 0x68706F  # PostgreSQL's advisory locks are numbers: "hpo"


@contextmanager
def exclusive(engine: sa.Engine, stop: threading.Event | None = None) -> Iterator[sa.Connection | None]:
    """Hold the lock of this database; yield its connection, None for SQLite.

    Raises StoppedError if `stop` was set while another process had the lock, OutageError if this one lost it.
    """
    path = sqlite_path(engine.url)
    if path is not None:
        with _file_lock(path, stop):
            yield None
        return
    with engine.begin() as connection:
        bound = f"SET LOCAL idle_in_transaction_session_timeout = '{LOCK_SECONDS * 1000:.0f}ms'"
        connection.exec_driver_sql(bound)
        lock = sa.select(sa.func.pg_try_advisory_xact_lock(_POSTGRES_LOCK))
        while not connection.execute(lock).scalar_one():
            _wait_for_lock(stop)
        yield connection


@contextmanager
def _file_lock(path: Path, stop: threading.Event | None) -> Iterator[None]:
    name = path.with_name(path.name + ".lock")
    sign_of_life, since = (0, 0), 0.0
    while True:
        try:
            lock = name.open("a")
        except OSError as error:
            raise StorageError(
                f"The folder `{path.parent}` must be writable, because SQLite keeps files beside "
                f"`{path.name}`, but: {error.strerror}."
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                seen = os.fstat(lock.fileno())
                if sign_of_life != (seen.st_ino, seen.st_mtime_ns):
                    sign_of_life, since = (seen.st_ino, seen.st_mtime_ns), time.monotonic()
                elif time.monotonic() - since > LOCK_SECONDS:
                    name.unlink(missing_ok=True)  # the next to come makes a new one
            else:
                if _is_file(lock, name):  # not one that was taken away just now
                    with _signs_of_life(lock):
                        yield
                    if not _is_file(lock, name):
                        raise OutageError(f"this process was stopped, and has lost the lock {name}.")
                    return
        _wait_for_lock(stop)


@contextmanager
def _signs_of_life(lock: IO[str]) -> Iterator[None]:
    """Change the time of the file again and again, which a process that is stopped does not do."""
    done = threading.Event()

    def touch() -> None:
        os.utime(lock.fileno())
        while not done.wait(LOCK_SECONDS / 4):
            os.utime(lock.fileno())

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_file(file: IO[str], path: Path) -> bool:
    return path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino


def _wait_for_lock(stop: threading.Event | None) -> None:
    seconds = random.uniform(0.01, 0.1)
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise StoppedError("told to stop while another process had the database to itself.")
