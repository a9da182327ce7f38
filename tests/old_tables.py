"""Databases as earlier versions of hpo left them."""

from __future__ import annotations

import sqlalchemy as sa
from worker_process import study

from hpo.study.storage import open_storage


def make_v1(url: str) -> None:
    """A database as the first version left it, with a study in it."""
    with open_storage(url) as storage:
        storage.create_or_resume_study(study(n_trials=3))
        with storage.engine.begin() as connection:
            for table in ("hpo_version", "hpo_jobs", "hpo_artifacts"):
                connection.execute(sa.text(f"DROP TABLE {table}"))
            connection.execute(sa.text("DROP INDEX ix_hpo_slots_state"))
            dropped = ("studies.state", "studies.priority", "slots.saved_step", "workers.job")
            for table, column in (name.split(".") for name in dropped):
                connection.execute(sa.text(f"ALTER TABLE hpo_{table} DROP COLUMN {column}"))
