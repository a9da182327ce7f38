"""How a study's database is opened, and what each of its failures means to the user.

SQLite and PostgreSQL go through one path: SQLAlchemy. Optuna makes its own tables, and crashes when several
processes do so at once, so the schema is made by one process at a time: the others wait on a lock and
then find it there. A URL holds a password, so no message shows one as it was given.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from hpo.errors import (
    HpoError,
    NoDatabaseError,
    OutageError,
    RunError,
    StoppedError,
    StorageError,
    shorten,
)
from hpo.study.migrations import newest_version, stored_version, upgrade
from hpo.study.sqlite_place import check_place

_logger = logging.getLogger(__name__)

DEFAULT_URL = "sqlite:///runs/hpo.db"
URL_FROM_FILE = "@"
BUSY_SECONDS = 60.0
"""How long a write waits for other processes (SQLite)."""

_READ_ONLY = "25006"
"""PostgreSQL's code of a write to a server that is not the primary, or not any more."""

_SCHEMA_LOCK = 0x68706F  # PostgreSQL's advisory locks are numbers: "hpo"
_EXAMPLES = "`sqlite:///runs/hpo.db` or `postgresql://user:password@host:5432/database`"

# What the driver says -> what must hold and what to do.
_NOT_THERE = {
    r"failed to resolve host|could not translate host|name or service not known|getaddrinfo": (
        "the host cannot be found. Check its name in the storage URL"
    ),
    r"connection refused|timeout expired|connection timeout|no route to host|network is unreachable": (
        "no database answers there. Check host and port, and that the server runs"
    ),
    r"readonly database|read-only transaction": (
        "the database must be writable, and SQLite's folder too. Change the permissions or name another place"
    ),
}
"""Wrong input of who opens a database; to a worker it may be away."""
_WRONG_INPUT = {
    r"password authentication failed|no password supplied": (
        "the server refuses this user and password. Check both in the storage URL"
    ),
    r'database "[^"]*" does not exist': "the server has no such database. Create it, e.g. with `createdb`",
    r"root certificate file|certificate verify failed|does not match host name": (
        "the server's certificate must be one that `sslrootcert` in the URL vouches for, and be for this "
        "host's name. Check both"
    ),
    r"invalid \S+ value|invalid connection option|invalid integer value": (
        "PostgreSQL does not know such an option. Check what follows `?` in the storage URL"
    ),
    r"no pg_hba.conf entry|does not support ssl|certificate|ssl error": (
        "the server refuses such a connection. Check `sslmode` in the URL and the server's pg_hba.conf"
    ),
    r"permission denied for|must be owner": (
        "the user must be allowed to create tables and to write them. Grant it, e.g. with "
        "`GRANT CREATE, USAGE ON SCHEMA public TO user`"
    ),
    r"unable to open database file": (
        "the file cannot be opened or made. Its folder must exist, and both must be writable"
    ),
    r"file is not a database|malformed": "it must be a SQLite database. Name another file, or move this one",
}
_CANNOT_GO_ON = {
    r"database is locked": "another program holds it locked. End that, or use PostgreSQL for many workers",
    r"disk is full|no space left|could not extend file": "its disk is full. Make room, then run this again",
}


def storage_url(given: str | None = None) -> str:
    """Return where the study lives: `given` (--storage), else HPO_STORAGE, else SQLite under runs/.

    `@FILE` stands for the URL in a file, so that no password is among a process's arguments and variables.

    Raises:
        StorageError: the file cannot be read, others may read it, or it holds no URL.
    """
    url = given or os.environ.get("HPO_STORAGE") or DEFAULT_URL
    return _url_in(Path(url.removeprefix(URL_FROM_FILE))) if url.startswith(URL_FROM_FILE) else url


def _url_in(file: Path) -> str:
    try:
        with file.open() as opened:
            about, text = os.fstat(opened.fileno()), opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise StorageError(f"The file `{file}` must hold the URL of the storage, but: {why}.") from None
    # As PostgreSQL's of keys: a group may read what is root's, which is how Kubernetes hands out secrets.
    if about.st_mode & (0o027 if about.st_uid == 0 else 0o077):
        raise StorageError(
            f"The file `{file}` holds a password, so only its owner may read it, but its mode is "
            f"{about.st_mode & 0o777:04o}. Run `chmod 600 {file}`."
        )
    if not re.fullmatch(r"\w+(\+\w+)?://\S.*", text):  # not shown: it may be the password
        raise StorageError(f"The file `{file}` must hold the URL of the storage ({_EXAMPLES}) in one line.")
    return text


def parse_url(url: str) -> sa.URL:
    """Return `url` with its driver.

    Raises:
        StorageError: it is no URL, or neither a SQLite file nor PostgreSQL.
    """
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        raise StorageError(
            f"The storage must be a URL such as {_EXAMPLES}, but it is `{redact(url)}`."
        ) from None
    backend = {"postgres": "postgresql"}.get(parsed.get_backend_name(), parsed.get_backend_name())
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise StorageError(
            f"The storage must be SQLite or PostgreSQL ({_EXAMPLES}), but `{redact(url)}` names `{backend}`."
        )
    if not parsed.database or parsed.database == ":memory:":
        raise StorageError(
            "A study in memory would be lost at the end of the command. Name a file: sqlite:///runs/hpo.db"
        )
    return parsed.set(drivername="sqlite")


def redact(url: str) -> str:
    """Return `url` with `***` in place of its password, for messages."""
    hidden = re.sub(r"(?i)([?&](?:ssl)?password=)[^&]*", r"\1***", url)
    # The greedy match reaches the last @: a password may hold one that nobody quoted.
    return re.sub(r"(://[^:/?#]*):.*@", r"\1:***@", hidden)


def place(url: str) -> str:
    """Return `url` for messages, with the whole path of a SQLite file that it names by a relative one."""
    path = sqlite_path(parse_url(url))
    shown = redact(url)
    return shown if path is None or path.is_absolute() else f"{shown} ({path.absolute()})"


def check_folder(url: str) -> None:
    """Raise StorageError where the folder of a SQLite file does not exist, or is on a network file system."""
    path = sqlite_path(parse_url(url))
    if path is None:
        return
    if not path.parent.is_dir():
        raise StorageError(f"The folder `{path.parent}` of {redact(url)} must exist. Create it first.")
    check_place(path)


def open_database(
    url: str, *, create: bool, stop: threading.Event | None = None, patience_seconds: float = 0.0
) -> optuna.storages.RDBStorage:
    """Connect, make Optuna's tables and ours where they are missing or old, and return Optuna's storage.

    Without `create`, for commands that only read, a database without a study or with old tables is an error.
    With `stop` a database that is away is waited for. One that refuses the user, or that a server does not
    have, is not away: it would be the same again.

    Raises:
        StorageError: the database cannot be used as it is named; NoDatabaseError where it is not there.
        RunError: it can, but not now (locked, disk full); OutageError: it was away for `patience_seconds`;
            StoppedError: and `stop` was set.
    """
    deadline = time.monotonic() + patience_seconds
    is_waiting = False
    while True:
        try:
            return _open(url, create)
        except HpoError as error:
            cause = error.__cause__
            if stop is None or cause is None or not is_outage(cause) or _find(_WRONG_INPUT, _text(cause)):
                raise
            if time.monotonic() > deadline:
                raise OutageError(str(error)) from error
            if not is_waiting:
                _logger.warning("Waiting for the database, %.0f s at most. (%s)", patience_seconds, error)
                is_waiting = True
            if stop.wait(min(1.0, patience_seconds / 10)):
                raise StoppedError(f"told to stop while the database is away. {error}") from error


def _open(url: str, create: bool) -> optuna.storages.RDBStorage:
    parsed = parse_url(url)
    path = sqlite_path(parsed)
    if create:
        check_folder(url)
    elif path is not None and not path.exists():
        raise NoDatabaseError(f"There is no study database at {place(url)}. `hpo run STUDY` makes one.")
    try:
        engine = connect(url)
        try:
            if not create:
                if (version := _version(engine)) is None:
                    raise NoDatabaseError(f"{place(url)} holds no study yet. `hpo run STUDY` makes one.")
                if version != newest_version():
                    raise StorageError(
                        f"The tables in {place(url)} are of an earlier hpo ({version}). "
                        "`hpo doctor --fix` moves them up; nothing stored is lost."
                    )
            else:
                with exclusive(engine):  # before the first connection: only one may turn on SQLite's log
                    if (version := _version(engine)) != newest_version():
                        if version is None:
                            optuna_storage(parsed).engine.dispose()
                        with engine.begin() as connection:
                            upgrade(connection)  # last: these tables mean that the schema is complete
        finally:
            engine.dispose()
        return optuna_storage(parsed)
    except (SQLAlchemyError, StorageInternalError, sqlite3.Error, ImportError) as error:
        raise explain(url, error) from error


def connect(url: str) -> sa.Engine:
    """Return the database at `url` as it is, with whatever tables; an absent SQLite file is made."""
    parsed = parse_url(url)
    return sa.create_engine(parsed, pool=_connection_pool(parsed))


def optuna_storage(url: sa.URL, **options: Any) -> optuna.storages.RDBStorage:
    """Optuna's storage, with its tables made where they are missing; `options` are RDBStorage's.

    Raises:
        StorageError: the tables are of another version of Optuna.
    """
    # Optuna calls str.format on the URL, so braces in a password are doubled.
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    pool = _connection_pool(url)
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


def _version(engine: sa.Engine) -> str | None:
    with engine.connect() as connection:
        return stored_version(connection)


def _connection_pool(url: sa.URL) -> sa.Pool:
    if url.get_backend_name() == "sqlite":
        pool = sa.create_pool_from_url(url, connect_args={"timeout": BUSY_SECONDS})
        sa.event.listen(pool, "connect", _set_up_sqlite)
        return pool
    from hpo.study.connection import postgres_pool  # psycopg, which SQLite does without

    return postgres_pool(url)


def _set_up_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # With a write-ahead log readers never wait for the writer, and a commit needs no fsync: a power cut may
    # lose the last commits, never the database (https://www.sqlite.org/pragma.html#pragma_synchronous).
    connection.execute("PRAGMA journal_mode=WAL").close()
    connection.execute("PRAGMA synchronous=NORMAL").close()


def sqlite_path(url: sa.URL) -> Path | None:
    """Return the file of a SQLite database; None: it is none."""
    if url.get_backend_name() != "sqlite":
        return None
    return Path(str(url.database).removeprefix("file:"))


@contextmanager
def exclusive(engine: sa.Engine) -> Iterator[sa.Connection | None]:
    """Hold a lock that one process at a time has, of all that use this database; yield its connection."""
    path = sqlite_path(engine.url)
    if path is None:
        from hpo.study.connection import wait_for_lock

        with engine.begin() as connection:
            wait_for_lock(connection, sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})
            yield connection
        return
    try:
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise StorageError(
            f"The folder `{path.parent}` must be writable, because SQLite keeps files beside `{path.name}`, "
            f"but: {error.strerror}."
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield None


@contextmanager
def snapshot(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection of which all queries see the database as it was at the first of them."""
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execution_options(isolation_level="REPEATABLE READ")
        else:
            connection.exec_driver_sql("BEGIN")  # sqlite3 begins a transaction only before a change
        yield connection


def allow_idle(*connections: sa.Connection | None) -> None:
    """Let the transactions of these connections wait, for as long as it takes, for what else is done."""
    for connection in connections:
        if connection is not None and connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")


def explain(url: str, error: BaseException) -> HpoError:
    """Return what `error` means to the user, without the password."""
    text = _text(error)
    if password := sa.make_url(url).password:
        text = text.replace(str(password), "***")
    for kind, failures in ((StorageError, _WRONG_INPUT | _NOT_THERE), (RunError, _CANNOT_GO_ON)):
        if advice := _find(failures, text):
            return kind(f"{redact(url)}: {advice}. ({shorten(text, 300)})")
    return RunError(f"{redact(url)}: the database gave an error: {shorten(text, 500)}")


def is_outage(error: BaseException) -> bool:
    """Whether the database may work again soon: a restart, a lost connection, a long lock, a failover."""
    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    if getattr(error, "connection_invalidated", False):
        return True
    if getattr(_driver_error(error), "sqlstate", None) == _READ_ONLY:
        return True
    if not isinstance(error, OperationalError):
        return False
    return not isinstance(error.orig, sqlite3.Error) or "locked" in str(error.orig)


def _find(failures: Mapping[str, str], text: str) -> str | None:
    """The advice for what the driver says; None: it is none of `failures`."""
    return next((failures[found] for found in failures if re.search(found, text, re.IGNORECASE)), None)


def _text(error: BaseException) -> str:
    return " ".join(str(_driver_error(error)).split())


def _driver_error(error: BaseException) -> BaseException:
    while True:
        inner = getattr(error, "orig", None) or (
            error.__cause__ if isinstance(error, StorageInternalError) else None
        )
        if inner is None:
            return error
        error = inner
