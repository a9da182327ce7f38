"""Opening of a study's database: one process creates Optuna's tables and ours, in one transaction.

Optuna would create its tables in transactions of its own, in which several processes at once crash. The lock
of a whole database lives as long as a transaction: PostgreSQL has advisory locks for that, and SQLite has one
writer. All work under the lock uses its connection, because a second one could wait forever behind a pooler
with few connections. A waiting process asks again in a new transaction.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import sqlalchemy as sa

from hpo.errors import NoDatabaseError, StoppedError, StorageError
from hpo.redaction import redact
from hpo.study.store import connection as bounds
from hpo.study.store import optuna_internals
from hpo.study.store.database import check_folder, connect, parse_url, shown_url, sqlite_path
from hpo.study.store.failures import is_locked
from hpo.study.store.schema import VERSION, create_tables, stored_version

_RANDOM = random.SystemRandom()  # the generator of `random` belongs to training loops
_POSTGRES_LOCK = 0x68706F  # PostgreSQL's advisory locks are numbers: "hpo"


@contextmanager
def exclusive(engine: sa.Engine, stop: threading.Event | None = None) -> Iterator[sa.Connection]:
    """Yield a connection in a transaction that holds the lock; the lock ends with the block.

    Raises StoppedError if `stop` is set meanwhile. On SQLite it raises OperationalError after `BUSY_SECONDS`.
    """
    deadline = time.monotonic() + bounds.BUSY_SECONDS
    while True:
        with engine.begin() as connection:
            if _lock(connection, deadline):
                yield connection
                return
        if (stop or threading.Event()).wait(_RANDOM.uniform(0.01, 0.1)):
            raise StoppedError("told to stop while another process had the database to itself.")


def _lock(connection: sa.Connection, deadline: float) -> bool:
    if connection.dialect.name == "postgresql":
        lock = sa.select(sa.func.pg_try_advisory_xact_lock(_POSTGRES_LOCK))
        return bool(connection.execute(lock).scalar_one())
    connection.exec_driver_sql("PRAGMA busy_timeout = 0")  # SQLite's own wait would not notice `stop`
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except sa.exc.OperationalError as error:
        if not is_locked(error) or time.monotonic() > deadline:
            raise
        return False
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {bounds.BUSY_SECONDS * 1000:.0f}")
    return True


def open_database(url: str, *, create: bool, stop: threading.Event | None = None) -> sa.Engine:
    """Return an engine for the database, with Optuna's tables and ours.

    Raises StorageError if it cannot be used, NoDatabaseError if it or our tables are missing without
    `create`.
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
    stored = stored_version(connection)
    if stored not in (None, VERSION):
        raise StorageError(
            f"The tables of hpo in {redact(url)} must be of version {VERSION}, but they are of {stored}. "
            "Name a new database, or use the hpo that made this one. Plain Optuna still reads its studies."
        )
    return stored is not None


def optuna_storage(engine: sa.Engine) -> optuna.storages.RDBStorage:
    """Return Optuna's storage on the connections of `engine`. Raises StorageError for another version."""
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
