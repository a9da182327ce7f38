"""Databases as earlier versions of hpo left them."""

from __future__ import annotations

import sqlalchemy as sa
from worker_process import evaluate, study

from hpo.study.leases import WorkerLease
from hpo.study.storage import open_storage


def make_v1(url: str) -> None:
    """A database as the first version left it, with a study in it."""
    with open_storage(url) as storage:
        storage.create_or_resume_study(study(n_trials=3))
        with storage.engine.begin() as connection:
            for table in ("hpo_version", "hpo_jobs", "hpo_artifacts", "hpo_detailed_evaluations"):
                connection.execute(sa.text(f"DROP TABLE {table}"))
            connection.execute(sa.text("DROP INDEX ix_hpo_slots_state"))
            _drop(connection, "studies.state", "studies.priority", "slots.saved_step", "workers.job")
            _drop(connection, "evaluations.numerics")


def make_v2(url: str) -> None:
    """A database as the second version left it, with an evaluation in it."""
    _make_evaluated(url, "v2", "evaluations.numerics")


def make_v3(url: str) -> None:
    """A database as the third version left it, with an evaluation in it."""
    _make_evaluated(url, "v3")


def _make_evaluated(url: str, version: str, *without: str) -> None:
    with open_storage(url) as storage:
        opened = storage.create_or_resume_study(study(n_trials=1))
        with WorkerLease(storage, opened, max_retries=0) as worker:
            evaluate(storage, worker.open_trial(worker.claim()), 1, 0.5, 40)
        with storage.engine.begin() as connection:
            connection.execute(sa.text(f"UPDATE hpo_version SET version_num = '{version}'"))
            connection.execute(sa.text("DROP TABLE hpo_detailed_evaluations"))
            _drop(connection, *without)


def _drop(connection: sa.Connection, *columns: str) -> None:
    for table, column in (name.split(".") for name in columns):
        connection.execute(sa.text(f"ALTER TABLE hpo_{table} DROP COLUMN {column}"))
