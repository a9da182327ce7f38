"""Workers and another program share a PgBouncer in transaction mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from support.one_connection import one_connection
from support.pgbouncer import PROGRAM, server_settings, transaction_pool
from support.postgres import PostgresServer
from support.worker_process import check_done, finish, start_process, study, work

from hpo.config.study_config import StudyConfig
from hpo.study.reading.reader import read_study
from hpo.study.store.storage import open_storage

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed"),
]

POOL_SIZE, NUM_WORKERS = 2, 8


@pytest.fixture
def pool_url(postgres_server: PostgresServer, postgres_url: str) -> Iterator[str]:
    with transaction_pool(postgres_server, postgres_url.rpartition("/")[2], POOL_SIZE) as url:
        yield url


class OtherProgram:
    """Reads the settings of its server connection in many short transactions."""

    def __init__(self, url: str) -> None:
        self._url, self._leaving = url, threading.Event()
        self.seen: list[dict[str, str]] = []
        self.pids: set[int] = set()
        """Process ids of the server."""
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> OtherProgram:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()

    def _read(self) -> None:
        with psycopg.connect(self._url, prepare_threshold=None, application_name="other") as connection:
            while not self._leaving.wait(0.05):
                with connection.transaction():
                    row = connection.execute("SELECT pg_backend_pid()").fetchone()
                    assert row is not None
                    self.pids.add(row[0])
                    self.seen.append(server_settings(connection))


def be_worker(url: str, config: StudyConfig, log: Path) -> None:
    with one_connection():
        work(url, config, log, trial_seconds=0.05)


def test_workers_share_two_connections_with_another_program(pool_url: str, tmp_path: Path) -> None:
    config, log = study(24), tmp_path / "log"
    with psycopg.connect(pool_url, prepare_threshold=None, application_name="other") as connection:
        before = server_settings(connection)
    with OtherProgram(pool_url) as other:
        finish(*(start_process(be_worker, pool_url, config, log) for _ in range(NUM_WORKERS)))
    assert len(other.pids) == POOL_SIZE, "it shares both connections with the workers"
    assert all(settings == before for settings in other.seen)
    with open_storage(pool_url) as storage:
        check_done(storage, config, log)
        assert len(read_study(storage, config.name).workers) == NUM_WORKERS
