"""How a study's database is opened: one process creates Optuna's tables and ours, in one transaction.

Optuna would create its tables in transactions of its own. Several processes that do so at once crash, and its
check of their version asks for a second connection inside a transaction. So both are done here.
"""

from __future__ import annotations

import threading

import optuna
import sqlalchemy as sa

from hpo.errors import NoDatabaseError, StorageError
from hpo.study.store import optuna_internals
from hpo.study.store.database import (
    check_folder,
    connect,
    connection_pool,
    parse_url,
    place,
    redact,
    sqlite_path,
    with_bounds,
)
from hpo.study.store.lock import exclusive
from hpo.study.store.schema import VERSION, create_tables, stored_version


def open_database(
    url: str, *, create: bool, stop: threading.Event | None = None
) -> optuna.storages.RDBStorage:
    """Connect, make Optuna's tables and ours where there are none, and return Optuna's storage.

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
                    optuna_internals.create_tables(connection)
                    create_tables(connection)
        else:
            with engine.connect() as connection:
                if not _has_tables(connection):
                    raise NoDatabaseError(f"{place(url)} holds no study yet. `hpo run STUDY` makes one.")
    finally:
        engine.dispose()
    return _optuna_storage(parsed)


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


def _optuna_storage(url: sa.URL) -> optuna.storages.RDBStorage:
    """Return Optuna's storage. Raises StorageError if its tables are of another version."""
    # Optuna calls str.format on the URL, so braces in a password are doubled.
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    pool = connection_pool(url)
    try:
        storage = optuna.storages.RDBStorage(
            text, engine_kwargs={"pool": pool}, skip_compatibility_check=True, skip_table_creation=True
        )
        with_bounds(storage.engine)
        current = storage.get_current_version()
        if current != storage.get_head_version():
            with storage.engine.connect() as connection:
                made_by = optuna_internals.stored_version(connection)
            upgrade = "End all workers, then run `optuna storage upgrade --storage URL`"
            advice = upgrade if current in storage.get_all_versions() else "Update Optuna"
            raise StorageError(
                f"The tables in {redact(text)} must be of Optuna {optuna.__version__}, but they are of "
                f"Optuna {made_by}. {advice}, or name another database."
            )
    except Exception:
        pool.dispose()  # Optuna leaves its connections open
        raise
    return storage
