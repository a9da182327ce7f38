"""The lock of a database, with killed, stopped and waiting processes."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.worker_process import start_process, wait_for

from hpo.errors import HpoError, StoppedError
from hpo.study.store import connection as bounds
from hpo.study.store.database import connect
from hpo.study.store.opening import exclusive


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


@pytest.mark.postgres
def test_stopped_process_loses_the_lock(postgres_url: str, tmp_path: Path) -> None:
    engine, log = connect(postgres_url), tmp_path / "log"
    process = start_process(hold, postgres_url, log, 1.0)
    wait_for(log.exists)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with exclusive(engine, threading.Event()):
            pass
    finally:
        log.unlink()
        os.kill(process.pid, signal.SIGCONT)
        process.join(60)
    assert log.read_text() == "lost it"
    engine.dispose()


def test_lock_ends_with_its_process(storage_url: str, tmp_path: Path) -> None:
    engine = connect(storage_url)
    process = start_process(hold, storage_url, tmp_path / "log", 45.0)
    wait_for((tmp_path / "log").exists)
    process.kill()
    with exclusive(engine, threading.Event()):
        pass
    engine.dispose()


def test_stop_while_waiting_for_the_lock(sqlite_url: str) -> None:
    """Waiting draws no number of the generator of a resumed trial."""
    url, stop = sqlite_url, threading.Event()
    stop.set()
    before = random.getstate()
    holder, waiting = connect(url), connect(url)
    with exclusive(holder), pytest.raises(StoppedError, match="another process"), exclusive(waiting, stop):
        pass
    assert random.getstate() == before
    holder.dispose()
    waiting.dispose()
