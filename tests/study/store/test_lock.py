"""A process that is stopped while it has the lock of a database does not stop the others for long."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from worker_process import start_process, wait_for

from hpo.errors import HpoError, StoppedError
from hpo.study.store import lock
from hpo.study.store.database import connect
from hpo.study.store.lock import exclusive
from hpo.study.store.storage import Storage


def hold(url: str, log: Path, seconds: float) -> None:
    """Have the lock until the file `log` is gone; note how that ended."""
    lock.LOCK_SECONDS = seconds
    engine = connect(url)
    try:
        with exclusive(engine):
            log.write_text("has it")
            while log.exists():
                time.sleep(0.01)
        log.write_text("kept it")
    except (HpoError, sa.exc.SQLAlchemyError):
        log.write_text("lost it")
    finally:
        engine.dispose()


@contextmanager
def held(url: str, log: Path, seconds: float) -> Iterator[int]:
    """Another process has the lock; yields its id."""
    process = start_process(hold, url, log, seconds)
    try:
        wait_for(log.exists)
        yield process.pid
    finally:
        os.kill(process.pid, signal.SIGCONT)
        log.unlink(missing_ok=True)
        process.join(60)


def test_a_stopped_process_loses_the_lock(
    storage_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LOCK_SECONDS", 1.0)
    engine, log = connect(storage_url), tmp_path / "log"
    with held(storage_url, log, 1.0) as pid:
        os.kill(pid, signal.SIGSTOP)
        with exclusive(engine, threading.Event()):
            pass
    assert log.read_text() == "lost it"
    with exclusive(engine):
        pass
    engine.dispose()


@pytest.mark.postgres
def test_the_server_ends_the_lock_of_a_stopped_process_before_a_lease(postgres_url: str) -> None:
    engine = connect(postgres_url)
    with exclusive(engine) as connection:
        assert connection is not None
        bound = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar_one()
    engine.dispose()
    assert bound == f"{lock.LOCK_SECONDS:.0f}s"
    assert Storage.lease_seconds > lock.LOCK_SECONDS


def test_waiting_for_the_lock_ends_when_told_to_stop(storage_url: str, tmp_path: Path) -> None:
    engine, stop = connect(storage_url), threading.Event()
    with held(storage_url, tmp_path / "log", 45.0):
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(StoppedError, match="another process had the database"), exclusive(engine, stop):
            pass
    engine.dispose()


def test_a_process_that_works_for_long_keeps_the_lock(sqlite_url: str, tmp_path: Path) -> None:
    engine, stop, log = connect(sqlite_url), threading.Event(), tmp_path / "log"
    with held(sqlite_url, log, 0.5):
        threading.Timer(2.0, stop.set).start()
        with pytest.raises(StoppedError), exclusive(engine, stop):
            pass
    assert log.read_text() == "kept it"
    engine.dispose()
