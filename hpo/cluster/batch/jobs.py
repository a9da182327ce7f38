"""Batch jobs that run a study's workers: which were submitted, as the study's database knows them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from hpo.study.store.schema import jobs
from hpo.study.store.storage import Storage

CONNECTIONS_PER_WORKER = 4
"""At most: for its trial, its heartbeat and its display, and of the process that watches it."""


@dataclass(frozen=True)
class JobRecord:
    """What one `hpo submit` submitted."""

    id: str
    """The scheduler, the cluster and the job's number there: `slurm:CLUSTER:123`."""
    study: str
    host: str
    """Where it was submitted."""
    num_workers: int
    created: datetime


def add_job(storage: Storage, job_id: str, study: str, num_workers: int) -> None:
    """Note that a job was submitted."""
    values = {"id": job_id, "study": study, "host": socket.gethostname(), "num_workers": num_workers}

    def insert() -> None:
        with storage.engine.begin() as connection:
            # A row of this name is of an earlier cluster, or of an attempt whose answer was lost.
            connection.execute(sa.delete(jobs).where(jobs.c.id == job_id))
            connection.execute(sa.insert(jobs).values(**values, created=storage.now))

    storage.persist(insert)


def read_jobs(storage: Storage, study: str) -> Sequence[JobRecord]:
    """Return the jobs of `study`, the oldest first."""
    query = sa.select(jobs).where(jobs.c.study == study)

    def read() -> list[JobRecord]:
        with storage.engine.connect() as connection:
            rows = connection.execute(query.order_by(jobs.c.created)).all()
        return [
            JobRecord(row.id, row.study, row.host, row.num_workers, datetime.fromtimestamp(row.created, UTC))
            for row in rows
        ]

    return storage.persist(read)


def connection_warning(storage: Storage, num_workers: int) -> str:
    """What to do where the server may refuse some of so many workers; empty: nothing.

    It is no error: what lies between, such as PgBouncer, may have fewer connections to the server.
    """
    with storage.engine.connect() as connection:
        limit = int(connection.exec_driver_sql("SHOW max_connections").scalar_one())
    needed = CONNECTIONS_PER_WORKER * num_workers
    if needed <= limit:
        return ""
    return (
        f"{num_workers} workers have up to {needed} connections to the database, which takes {limit}. Raise "
        "`max_connections` in its `postgresql.conf` and start it again, or submit fewer workers."
    )
