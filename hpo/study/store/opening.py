"""How a study's database is opened: one process creates Optuna's tables and ours, in one transaction.

Optuna would create its tables in transactions of its own. Several processes that do so at once crash, and its
check of their version asks for a second connection inside a transaction. So both are done here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import sqlalchemy as sa

from hpo.errors import NoDatabaseError, StorageError
from hpo.redaction import redact
from hpo.study.store import optuna_tables
from hpo.study.store.database import check_folder, connect, parse_url, place, sqlite_path
from hpo.study.store.lock import exclusive
from hpo.study.store.schema import VERSION, create_tables, stored_version

if TYPE_CHECKING:
    import optuna


def open_database(url: str, *, create: bool, stop: threading.Event | None = None) -> sa.Engine:
    """Connect, make Optuna's tables and ours where there are none, and return the database.

    Without `create`, a database without a study is an error.

    Raises:
        StorageError: the database cannot be used as it is named; NoDatabaseError where it is not there.
        StoppedError: `stop` was set while another process had the database to itself.
    """
    parsed = parse_url(url)
    if create:
        check_folder(url)
    elif (path := sqlite_path(parsed)) is not None and not path.exists():
        raise NoDatabaseError(f"There is no study database at {place(url)}. `hpo run STUDY` makes one.")
    engine = connect(url)
    try:
        if create:
            with exclusive(engine, stop) as connection:
                if not _has_tables(connection):
                    from hpo.study.store.optuna_internals import create_tables as create_optunas

                    create_optunas(connection)
                    create_tables(connection)
        else:
            with engine.connect() as connection:
                if not _has_tables(connection):
                    raise NoDatabaseError(f"{place(url)} holds no study yet. `hpo run STUDY` makes one.")
        with engine.connect() as connection:
            revision = optuna_tables.revision(connection)
        if revision != optuna_tables.REVISION:
            optuna_storage(engine)  # raises if this Optuna does not know these tables
    except BaseException:
        engine.dispose()
        raise
    return engine


def _has_tables(connection: sa.Connection) -> bool:
    """Return whether our tables are there. Raises StorageError where they are of another version."""
    stored = stored_version(connection)
    if stored not in (None, VERSION):
        url = connection.engine.url.render_as_string(hide_password=False)
        raise StorageError(
            f"The tables of hpo in {redact(url)} must be of "
            f"version {VERSION}, but they are of {stored}. Please name a new database, or use the hpo that "
            "made this one. Plain Optuna still reads its studies."
        )
    return stored is not None


def optuna_storage(engine: sa.Engine) -> optuna.storages.RDBStorage:
    """Return Optuna's storage on the connections of `engine`.

    Raises StorageError if its tables are of another version.
    """
    import optuna  # alembic, too

    from hpo.study.store import optuna_internals

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
