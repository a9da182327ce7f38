"""Creation and version checks of the tables of a database."""

from __future__ import annotations

import os
import signal
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from support.worker_process import run_until_killed, study

from hpo.errors import NoDatabaseError, StorageError
from hpo.study.store import schema
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study


@pytest.mark.parametrize(
    ("statement", "version"),
    [
        ("UPDATE hpo_version SET version_num = 'v999'", "v999"),
        ("DELETE FROM hpo_version", "an unknown version"),
        ("DROP TABLE hpo_version", "an unknown version"),
    ],
)
def test_tables_of_another_version_are_refused(storage_url: str, statement: str, version: str) -> None:
    with open_storage(storage_url) as storage:
        create_or_resume_study(storage, study(n_trials=3))
        with storage.engine.begin() as connection:
            connection.execute(sa.text(statement))
    with pytest.raises(StorageError) as refused:
        open_storage(storage_url)
    message = str(refused.value)
    assert f"must be of version {schema.VERSION}, but they are of {version}. " in message
    assert "Name a new database, or use the hpo that made this one" in message
    assert "secret" not in message
    optuna_storage = optuna.storages.RDBStorage(storage_url.replace("postgresql://", "postgresql+psycopg://"))
    assert optuna.load_study(study_name="tiny", storage=optuna_storage).trials == []
    optuna_storage.engine.dispose()


def make_and_die(url: str, statement: str) -> None:
    """Open the database, and die after the first such statement."""

    def die(_connection: Any, _cursor: Any, executed: str, *_: Any) -> None:
        if " ".join(executed.split()).startswith(statement):
            os.kill(os.getpid(), signal.SIGKILL)

    sa.event.listen(sa.Engine, "after_cursor_execute", die)
    open_storage(url).close()


@pytest.mark.parametrize("statement", ["CREATE TABLE hpo_claims", "INSERT INTO hpo_version"])
def test_kill_during_the_creation_leaves_no_tables(storage_url: str, statement: str) -> None:
    run_until_killed(make_and_die, storage_url, statement)
    with pytest.raises(NoDatabaseError, match="holds no study yet"):
        open_storage(storage_url, create=False)
    with open_storage(storage_url) as storage:
        create_or_resume_study(storage, study(n_trials=3))
        assert storage.trial_counts("tiny") == {"open": 3, "running": 0, "done": 0}
