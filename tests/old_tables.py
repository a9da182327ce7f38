"""A database as an earlier version of hpo left it."""

from __future__ import annotations

import sqlalchemy as sa
from worker_process import evaluate, study

from hpo.study.claims.leases import WorkerLease
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study


def make_old(url: str) -> None:
    """A database as version v1 left it, with a study of three slots and an evaluation."""
    with open_storage(url) as storage:
        opened = create_or_resume_study(storage, study(n_trials=3))
        with WorkerLease(storage, opened, max_retries=0) as worker:
            evaluate(storage, worker.open_trial(worker.claim()), 1, 0.5, 40)
        with storage.engine.begin() as connection:
            for statement in _CHANGES:
                connection.execute(sa.text(statement))


_CHANGES = [
    "ALTER TABLE hpo_slots ADD COLUMN trained BOOLEAN DEFAULT FALSE NOT NULL",
    "ALTER TABLE hpo_slots ADD COLUMN death_params INTEGER DEFAULT 0 NOT NULL",
    "ALTER TABLE hpo_slots DROP COLUMN saved_step",
    "ALTER TABLE hpo_workers ADD COLUMN cause VARCHAR(64)",
    "ALTER TABLE hpo_workers ADD COLUMN oom_kills INTEGER",
    "ALTER TABLE hpo_workers ADD COLUMN progress_at FLOAT",
    "ALTER TABLE hpo_workers DROP COLUMN progress",
    "ALTER TABLE hpo_workers DROP COLUMN job",
    "ALTER TABLE hpo_studies DROP COLUMN state",
    "ALTER TABLE hpo_studies DROP COLUMN priority",
    "CREATE TABLE hpo_artifacts (id TEXT PRIMARY KEY, study TEXT)",
    "CREATE TABLE hpo_jobs (id VARCHAR(128) PRIMARY KEY, study VARCHAR(512))",
    "DROP TABLE hpo_row_statistics",
    "DROP TABLE hpo_detailed_evaluations",
    "DROP INDEX ix_hpo_slots_state",
    "DROP TABLE hpo_version",
]
"""What takes the tables back to v1: all that any later version has changed."""
