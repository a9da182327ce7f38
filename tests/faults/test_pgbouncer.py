"""Workers share a PgBouncer in transaction mode with other programs."""

from __future__ import annotations

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


def be_worker(url: str, config: StudyConfig, log: Path) -> None:
    with one_connection():
        work(url, config, log, trial_seconds=0.05)


def settings_of_all(url: str) -> list[dict[str, str]]:
    """Return the settings of the server's connections, as another program sees them."""
    programs = [
        psycopg.connect(url, prepare_threshold=None, application_name="other") for _ in range(POOL_SIZE)
    ]
    try:
        found = [server_settings(program) for program in programs]  # each keeps its transaction open
    finally:
        for program in programs:
            program.close()
    return found


def test_workers_share_two_connections(pool_url: str, tmp_path: Path) -> None:
    """They leave no settings of a session to other programs."""
    config, log = study(24), tmp_path / "log"
    before = settings_of_all(pool_url)
    finish(*(start_process(be_worker, pool_url, config, log) for _ in range(NUM_WORKERS)))
    assert settings_of_all(pool_url) == before
    with open_storage(pool_url) as storage:
        check_done(storage, config, log)
        assert len(read_study(storage, config.name).workers) == NUM_WORKERS
