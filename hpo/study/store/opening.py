"""How a study's database is opened: Optuna's tables and ours are made, by one process at a time."""

from __future__ import annotations

import re
import threading
from typing import Any

import optuna
import sqlalchemy as sa

from hpo.errors import NoDatabaseError, StorageError
from hpo.study.store.database import (
    check_folder,
    connect,
    connection_pool,
    parse_url,
    place,
    redact,
    sqlite_path,
)
from hpo.study.store.lock import exclusive
from hpo.study.store.migrations import VERSIONS, stored_version, upgrade


def open_database(
    url: str, *, create: bool, stop: threading.Event | None = None
) -> optuna.storages.RDBStorage:
    """Connect, make Optuna's tables and ours where they are missing or old, and return Optuna's storage.

    Without `create`, for commands that only read, a database without a study or with old tables is an error.

    Raises:
        StorageError: the database cannot be used as it is named; NoDatabaseError where it is not there.
        StoppedError: `stop` was set while another process had the database to itself.
        What the driver, SQLAlchemy and Optuna raise: see `explain`.
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
                if _version(engine) != VERSIONS[-1]:
                    make_tables(engine)
        elif (version := _version(engine)) is None:
            raise NoDatabaseError(f"{place(url)} holds no study yet. `hpo run STUDY` makes one.")
        elif version != VERSIONS[-1]:
            raise StorageError(
                f"The tables in {place(url)} are of an earlier hpo ({version}). "
                "`hpo doctor --fix` moves them up; nothing stored is lost."
            )
    finally:
        engine.dispose()
    return optuna_storage(parsed)


def make_tables(engine: sa.Engine) -> None:
    """Make what is missing or old; to be called under `exclusive`."""
    optuna_storage(engine.url).engine.dispose()
    with engine.begin() as connection:
        upgrade(connection)  # last: our tables mean that Optuna's are there


def _version(engine: sa.Engine) -> str | None:
    with engine.connect() as connection:
        return stored_version(connection)


def optuna_storage(url: sa.URL, **options: Any) -> optuna.storages.RDBStorage:
    """Optuna's storage, with its tables made where they are missing; `options` are RDBStorage's.

    Raises:
        StorageError: the tables are of another version of Optuna.
    """
    # Optuna calls str.format on the URL, so braces in a password are doubled.
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    pool = connection_pool(url)
    try:
        return optuna.storages.RDBStorage(text, engine_kwargs={"pool": pool}, **options)
    except Exception as error:
        pool.dispose()  # Optuna leaves its connections open
        if "compatible with the table schema" not in str(error):
            raise
        made_by = re.search(r"set up by optuna ([^)]+)\)", str(error))
        advice = "Update Optuna" if "latest version" in str(error) else "Move them up with `hpo doctor --fix`"
        raise StorageError(
            f"The tables in {redact(text)} must be of Optuna {optuna.__version__}, but they are of "
            f"Optuna {made_by[1] if made_by else '?'}. {advice}, or name another database."
        ) from None
