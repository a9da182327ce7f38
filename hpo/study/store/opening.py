"""Opening of a study's database: one process creates Optuna's tables and ours, in one transaction.

Optuna would create its tables in transactions of its own. Several processes that do so at once crash, and its
version check asks for a second connection inside a transaction. So both are done here.
"""

from __future__ import annotations

import threading

import optuna
import sqlalchemy as sa

from hpo.errors import NoDatabaseError, StorageError
from hpo.redaction import redact
from hpo.study.store import optuna_internals
from hpo.study.store.database import check_folder, connect, parse_url, shown_url, sqlite_path
from hpo.study.store.lock import exclusive
from hpo.study.store.schema import VERSION, create_tables, stored_version


def open_database(url: str, *, create: bool, stop: threading.Event | None = None) -> sa.Engine:
    """Return an engine for the database, with Optuna's tables and ours.

    Without `create`, a missing database or one without our tables is an error.

    Raises:
        StorageError: the database cannot be used; NoDatabaseError: there is none.
        StoppedError: `stop` was set while another process held the lock.
    """
    path = sqlite_path(parse_url(url))
    if create:
        check_folder(url)
    elif path is not None and not path.exists():
        raise NoDatabaseError(f"There is no study database at {shown_url(url)}. `hpo run STUDY` makes one.")
    engine = connect(url)
    try:
        if create:
            with exclusive(engine, stop) as connection:
                if not _has_tables(connection, url):
                    optuna_internals.create_tables(connection)
                    create_tables(connection)
        with engine.connect() as connection:
            if not _has_tables(connection, url):
                raise NoDatabaseError(f"{shown_url(url)} holds no study yet. `hpo run STUDY` makes one.")
            revision = optuna_internals.revision(connection)
        if revision != optuna_internals.REVISION:
            optuna_storage(engine)  # raises if this Optuna does not know these tables
    except BaseException:
        engine.dispose()
        raise
    return engine


def _has_tables(connection: sa.Connection, url: str) -> bool:
    """Return true if our tables exist. Raises StorageError if their version is another one."""
    stored = stored_version(connection)
    if stored not in (None, VERSION):
        raise StorageError(
            f"The tables of hpo in {redact(url)} must be of version {VERSION}, but they are of {stored}. "
            "Name a new database, or use the hpo that made this one. Plain Optuna still reads its studies."
        )
    return stored is not None


def optuna_storage(engine: sa.Engine) -> optuna.storages.RDBStorage:
    """Return Optuna's storage on the connections of `engine`.

    Raises StorageError if its tables are of another version.
    """
    # Optuna calls str.format on the URL, so braces in a password are doubled.
    text = engine.url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    storage = optuna.storages.RDBStorage(
        text, engine_kwargs={"pool": engine.pool}, skip_compatibility_check=True, skip_table_creation=True
    )
    # One engine, so that after an outage all connections are closed at once.
    storage.scoped_session.remove()
    storage.scoped_session.configure(bind=engine)
    storage.engine = engine
    current = storage.get_current_version()
    if current != storage.get_head_version():
        with engine.connect() as connection:
            made_by = optuna_internals.stored_version(connection)
        upgrade = "End all workers, then run `optuna storage upgrade --storage URL`"
        advice = upgrade if current in storage.get_all_versions() else "Update Optuna"
        raise StorageError(
            f"The tables in {redact(text)} must be of Optuna {optuna.__version__}, but they are of "
            f"Optuna {made_by}. {advice}, or name another database."
        )
    return storage
