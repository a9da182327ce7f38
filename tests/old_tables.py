"""Databases as earlier versions of hpo left them."""

from __future__ import annotations

import sqlalchemy as sa
from worker_process import evaluate, study

from hpo.study.claims.leases import WorkerLease
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study


def make_old(url: str, version: str) -> None:
    """A database as that version left it, with a study of three slots and an evaluation."""
    with open_storage(url) as storage:
        opened = create_or_resume_study(storage, study(n_trials=3))
        with WorkerLease(storage, opened, max_retries=0) as worker:
            evaluate(storage, worker.open_trial(worker.claim()), 1, 0.5, 40)
        with storage.engine.begin() as connection:
            for later in ("v9", "v8", "v7", "v6", "v5", "v4", "v3", "v2"):
                if version < later:
                    for statement in _UNDO[later]:
                        connection.execute(sa.text(statement))
            if version != "v1":
                connection.execute(sa.text(f"UPDATE hpo_version SET version_num = '{version}'"))


_UNDO = {
    "v9": ["ALTER TABLE hpo_slots ADD COLUMN trained BOOLEAN DEFAULT FALSE NOT NULL"],
    "v8": [
        "CREATE TABLE hpo_jobs (id VARCHAR(128) PRIMARY KEY, study VARCHAR(512))",
        "ALTER TABLE hpo_workers ADD COLUMN cause VARCHAR(64)",
        "ALTER TABLE hpo_workers ADD COLUMN progress_at FLOAT",
    ],
    "v7": ["DROP TABLE hpo_row_statistics"],
    "v6": ["CREATE TABLE hpo_artifacts (id TEXT PRIMARY KEY, study TEXT)"],
    "v5": [
        "ALTER TABLE hpo_workers DROP COLUMN progress",
        "ALTER TABLE hpo_workers DROP COLUMN progress_at",
        "ALTER TABLE hpo_workers ADD COLUMN oom_kills INTEGER",
        "ALTER TABLE hpo_slots ADD COLUMN death_params INTEGER DEFAULT 0 NOT NULL",
    ],
    "v4": ["DROP TABLE hpo_detailed_evaluations"],
    "v3": ["ALTER TABLE hpo_evaluations DROP COLUMN numerics"],
    "v2": [
        "DROP INDEX ix_hpo_slots_state",
        "DROP TABLE hpo_jobs",
        "DROP TABLE hpo_version",
        "ALTER TABLE hpo_studies DROP COLUMN state",
        "ALTER TABLE hpo_studies DROP COLUMN priority",
        "ALTER TABLE hpo_slots DROP COLUMN saved_step",
        "ALTER TABLE hpo_workers DROP COLUMN job",
    ],
}
"""What takes a version back to the one before."""
