"""Databases of other versions of hpo."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from worker_process import study

from hpo.errors import StorageError
from hpo.study import schema
from hpo.study.migrations import newest_version, stored_version
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


def differences(engine: sa.Engine) -> list[object]:
    """What Alembic would change in our tables to make them those of `schema`."""
    with engine.connect() as connection:
        options = {"include_name": lambda name, kind, _: kind != "table" or name in schema.metadata.tables}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata))


def test_a_new_database_is_of_the_newest_version(storage_url: str) -> None:
    with open_storage(storage_url) as storage, storage.engine.connect() as connection:
        assert stored_version(connection) == newest_version()
        assert differences(storage.engine) == []


def test_a_database_of_the_first_version_is_moved_up_with_what_it_holds(storage_url: str) -> None:
    make_v1(storage_url)
    with pytest.raises(StorageError, match=r"of an earlier hpo \(v1\). `hpo doctor --fix` moves them up"):
        open_storage(storage_url, create=False)
    with open_storage(storage_url) as storage:
        assert differences(storage.engine) == []
        assert storage.slot_counts("tiny") == {"open": 3, "running": 0, "done": 0}
        assert storage.create_or_resume_study(study(n_trials=3)).study_name == "tiny"
    with open_storage(storage_url, create=False) as storage:
        assert storage.read_study("tiny").slots["open"] == 3


@pytest.mark.parametrize("create", [True, False])
def test_a_database_of_a_later_version_is_refused(storage_url: str, create: bool) -> None:
    with open_storage(storage_url) as storage, storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpo_version SET version_num = 'v999'"))
    with pytest.raises(StorageError, match=r"a later hpo has made them \(v999\). Update hpo"):
        open_storage(storage_url, create=create)
