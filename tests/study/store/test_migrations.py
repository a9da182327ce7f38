"""Databases of other versions of hpo."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import sqlalchemy as sa
from detailed_documents import document
from old_tables import make_old
from worker_process import start_process, study

from hpo.errors import StorageError
from hpo.study.reading.detailed_evaluations import store_detailed_evaluation
from hpo.study.reading.reader import read_study
from hpo.study.store.migrations import is_current
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


def check_current(storage: Storage) -> None:
    with storage.engine.connect() as connection:
        assert is_current(connection)
        there = sa.inspect(connection)
        assert not there.has_table("hpo_artifacts")
        assert not there.has_table("hpo_jobs")
        tables = ("hpo_slots", "hpo_workers")
        columns = {column["name"] for table in tables for column in there.get_columns(table)}
        assert not columns & {"oom_kills", "cause", "trained", "death_params"}
    assert storage.slot_counts("tiny") == {"open": 3, "running": 0, "done": 0}


def test_a_database_of_an_earlier_version_is_moved_up_with_what_it_holds(storage_url: str) -> None:
    make_old(storage_url)
    with pytest.raises(StorageError, match=r"of an earlier hpo \(v1\). `hpo doctor --fix` moves them up"):
        open_storage(storage_url, create=False)
    with open_storage(storage_url) as storage:
        check_current(storage)
        assert create_or_resume_study(storage, study(n_trials=3)).study_name == "tiny"
    with open_storage(storage_url, create=False) as storage:
        (trial,) = read_study(storage, "tiny").trials
        (evaluation,) = trial.evaluations
        assert (evaluation.step, evaluation.metrics) == (40, {"score": 0.5})
        assert trial.detailed == {}
        store_detailed_evaluation(storage, "tiny", storage.study_token("tiny"), 0, document({}))
        assert read_study(storage, "tiny").trials[0].detailed == {"test": document({})}


def test_what_somebody_has_added_stays(storage_url: str) -> None:
    with open_storage(storage_url) as storage:
        with storage.engine.begin() as connection:
            connection.execute(sa.text("ALTER TABLE hpo_compat ADD COLUMN color TEXT"))
            connection.execute(sa.text("CREATE TABLE hpo_notes (text TEXT)"))
            connection.execute(sa.text("UPDATE hpo_version SET version_num = 'v8'"))
        with open_storage(storage_url), storage.engine.connect() as connection:
            assert is_current(connection)
            connection.execute(sa.text("SELECT color FROM hpo_compat, hpo_notes"))


@pytest.mark.parametrize("create", [True, False])
def test_a_database_of_a_later_version_is_refused(storage_url: str, create: bool) -> None:
    with open_storage(storage_url) as storage, storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpo_version SET version_num = 'v999'"))
    with pytest.raises(StorageError, match=r"a later hpo has made them \(v999\). Update hpo"):
        open_storage(storage_url, create=create)


def upgrade_and_die(url: str, statement: str) -> None:
    """Open the database, and be killed after the first statement that begins so."""

    def die(_connection: Any, _cursor: Any, executed: str, *_: Any) -> None:
        if " ".join(executed.split()).startswith(statement):
            os.kill(os.getpid(), signal.SIGKILL)

    sa.event.listen(sa.Engine, "after_cursor_execute", die)
    open_storage(url).close()


@pytest.mark.parametrize(
    "statement",
    ["ALTER TABLE hpo_studies ADD COLUMN priority", "INSERT INTO hpo_version"],
)
def test_a_migration_that_is_killed_leaves_the_version_before(storage_url: str, statement: str) -> None:
    make_old(storage_url)
    killed = start_process(upgrade_and_die, storage_url, statement)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    with pytest.raises(StorageError, match=r"of an earlier hpo \(v1\)"):
        open_storage(storage_url, create=False)
    with open_storage(storage_url) as storage:
        check_current(storage)
