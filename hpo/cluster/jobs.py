"""Batch jobs that run a study's workers: which were submitted, as the study's database knows them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from hpo.study.schema import jobs
from hpo.study.storage import Storage


@dataclass(frozen=True)
class JobRecord:
    """What one `hpo submit` submitted."""

    id: str
    """The scheduler and its number: `slurm:123`."""
    study: str | None
    """None: its workers serve every open study of the database."""
    host: str
    """Where it was submitted."""
    num_workers: int
    created: datetime


def add_job(storage: Storage, job_id: str, study: str | None, num_workers: int) -> None:
    """Note that a job was submitted."""
    values = {"id": job_id, "study": study, "host": socket.gethostname(), "num_workers": num_workers}

    def insert() -> None:
        with storage.engine.begin() as connection:
            # A row of this name is of an earlier cluster, or of an attempt whose answer was lost.
            connection.execute(sa.delete(jobs).where(jobs.c.id == job_id))
            connection.execute(sa.insert(jobs).values(**values, created=storage.now))

    storage.persist(insert)


def read_jobs(storage: Storage, study: str) -> Sequence[JobRecord]:
    """Return the jobs whose workers may work on `study`, the oldest first."""
    query = sa.select(jobs).where(sa.or_(jobs.c.study == study, jobs.c.study.is_(None)))

    def read() -> list[JobRecord]:
        with storage.engine.connect() as connection:
            rows = connection.execute(query.order_by(jobs.c.created)).all()
        return [
            JobRecord(row.id, row.study, row.host, row.num_workers, datetime.fromtimestamp(row.created, UTC))
            for row in rows
        ]

    return storage.persist(read)
