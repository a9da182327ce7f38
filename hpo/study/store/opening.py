"""How a study's database is opened: Optuna's tables and ours are made, by one process at a time."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

import sqlalchemy as sa

from hpo.errors import NoDatabaseError, StorageError
from hpo.study.store import optuna_tables
from hpo.study.store.database import (
    check_folder,
    connect,
    parse_url,
    place,
    redact,
    sqlite_path,
)
from hpo.study.store.lock import exclusive
from hpo.study.store.schema import VERSION, make_tables, stored_version

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
            with exclusive(engine, stop):  # before the first connection: only one may turn on SQLite's log
                if not _has_tables(engine):
                    optuna_storage(engine)
                    with engine.begin() as connection:
                        make_tables(connection)  # last: our tables mean that Optuna's are there
        elif not _has_tables(engine):
            raise NoDatabaseError(f"{place(url)} holds no study yet. `hpo run STUDY` makes one.")
        with engine.connect() as connection:
            revision = optuna_tables.revision(connection)
        if revision != optuna_tables.REVISION:
            optuna_storage(engine)  # raises if this Optuna does not know these tables
    except BaseException:
        engine.dispose()
        raise
    return engine


def _has_tables(engine: sa.Engine) -> bool:
    """Whether our tables are there. Raises StorageError where they are of another version."""
    with engine.connect() as connection:
        stored = stored_version(connection)
    if stored not in (None, VERSION):
        raise StorageError(
            f"The tables of hpo in {redact(engine.url.render_as_string(hide_password=False))} must be of "
            f"version {VERSION}, but they are of {stored}. Please name a new database, or use the hpo that "
            "made this one. Plain Optuna still reads its studies."
        )
    return stored is not None


def optuna_storage(engine: sa.Engine) -> optuna.storages.RDBStorage:
    """Return Optuna's storage on the connections of `engine`, with its tables made.

    Raises StorageError if they are of another version.
    """
    import optuna  # alembic, too

    # Optuna calls str.format on the URL, so braces in a password are doubled.
    text = engine.url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    try:
        storage = optuna.storages.RDBStorage(text, engine_kwargs={"pool": engine.pool})
    except Exception as error:
        if "compatible with the table schema" not in str(error):
            raise
        made_by = re.search(r"set up by optuna ([^)]+)\)", str(error))
        upgrade = "End all workers, then run `optuna storage upgrade --storage URL`"
        advice = "Update Optuna" if "latest version" in str(error) else upgrade
        raise StorageError(
            f"The tables in {redact(text)} must be of Optuna {optuna.__version__}, but they are of "
            f"Optuna {made_by[1] if made_by else '?'}. {advice}, or name another database."
        ) from None
    # After an outage, all connections are closed at once.
    storage.scoped_session.remove()
    storage.scoped_session.configure(bind=engine)
    storage.engine = engine
    return storage
