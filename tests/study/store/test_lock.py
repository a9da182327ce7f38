"""The lock of a database, with killed, stopped and waiting processes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.worker_process import finish, start_process, study, wait_for

from hpo.errors import HpoError, RunError, StoppedError
from hpo.study.store import connection as bounds
from hpo.study.store.database import connect
from hpo.study.store.lock import exclusive
from hpo.study.store.schema import compat
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


def hold(url: str, log: Path, idle_seconds: float) -> None:
    """Hold the lock until the file `log` is gone; note the result in it."""
    bounds.IDLE_SECONDS = idle_seconds
    engine = connect(url)
    try:
        with exclusive(engine) as connection:
            log.write_text("has it")
            while log.exists():
                time.sleep(0.01)
            connection.execute(sa.select(1))
        log.write_text("kept it")
    except (HpoError, sa.exc.SQLAlchemyError):
        log.write_text("lost it")
    finally:
        engine.dispose()


@contextmanager
def held(url: str, log: Path, idle_seconds: float = 45.0) -> Iterator[int]:
    """Let another process hold the lock; yield its id."""
    process = start_process(hold, url, log, idle_seconds)
    try:
        wait_for(log.exists)
        yield process.pid
    finally:
        os.kill(process.pid, signal.SIGCONT)
        log.unlink(missing_ok=True)
        process.join(60)


@pytest.mark.postgres
def test_stopped_process_loses_the_lock(postgres_url: str, tmp_path: Path) -> None:
    engine, log = connect(postgres_url), tmp_path / "log"
    with held(postgres_url, log, 1.0) as pid:
        os.kill(pid, signal.SIGSTOP)
        with exclusive(engine, threading.Event()):
            pass
    assert log.read_text() == "lost it"
    with exclusive(engine):
        pass
    engine.dispose()


@pytest.mark.postgres
@pytest.mark.parametrize("begin", [exclusive, sa.Engine.begin])
def test_idle_transaction_ends_before_a_lease(
    postgres_url: str, begin: Callable[[sa.Engine], AbstractContextManager[sa.Connection]]
) -> None:
    with open_storage(postgres_url) as storage, begin(storage.engine) as connection:
        bound = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar_one()
    assert bound == f"{bounds.IDLE_SECONDS:.0f}s"
    assert Storage.lease_seconds > bounds.IDLE_SECONDS


def test_lock_ends_with_its_process(storage_url: str, tmp_path: Path) -> None:
    engine = connect(storage_url)
    process = start_process(hold, storage_url, tmp_path / "log", 45.0)
    wait_for((tmp_path / "log").exists)
    process.kill()
    with exclusive(engine, threading.Event()):
        pass
    engine.dispose()


def test_stop_while_waiting_for_the_lock(storage_url: str, tmp_path: Path) -> None:
    stop = threading.Event()
    with open_storage(storage_url, stop=stop) as storage, held(storage_url, tmp_path / "log"):
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(StoppedError) as stopped:
            create_or_resume_study(storage, study(1))
    assert str(stopped.value) == "told to stop while another process had the database to itself."


def test_stop_while_another_program_has_the_lock(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "BUSY_SECONDS", 0.05)
    stop = threading.Event()
    with open_storage(sqlite_url, stop=stop) as storage, held(sqlite_url, tmp_path / "log"):
        stop.set()
        with pytest.raises(
            StoppedError, match=r"^told to stop while another program has the database locked"
        ):
            storage.write(lambda connection: connection.execute(sa.delete(compat)))


def test_command_waits_briefly_for_a_locked_database(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "BUSY_SECONDS", 0.2)
    with held(sqlite_url, tmp_path / "log"), pytest.raises(RunError, match="another program holds it locked"):
        open_storage(sqlite_url)


NUM_AT_ONCE = 8


def create_tables(url: str, folder: Path, number: int) -> None:
    """Open the database at the same moment as the others."""
    (folder / str(number)).touch()
    while len(list(folder.iterdir())) < NUM_AT_ONCE:
        time.sleep(0.001)
    open_storage(url).close()


def test_processes_create_the_tables_concurrently(storage_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "ready"
    folder.mkdir()
    finish(*(start_process(create_tables, storage_url, folder, number) for number in range(NUM_AT_ONCE)))
    with open_storage(storage_url) as storage:
        create_or_resume_study(storage, study(1))


def test_waiting_does_not_use_the_random_generator(tmp_path: Path) -> None:
    """A resumed trial must draw the same numbers."""
    url, stop = f"sqlite:///{tmp_path}/hpo.db", threading.Event()
    stop.set()
    before = random.getstate()
    holder, waiting = connect(url), connect(url)
    with exclusive(holder), pytest.raises(StoppedError), exclusive(waiting, stop):
        pass
    assert random.getstate() == before
    holder.dispose()
    waiting.dispose()
