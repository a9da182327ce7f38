"""How a database is named, and how it is connected to.

SQLite and PostgreSQL go through one path: SQLAlchemy. A URL holds a password, so no message shows one as it
was given.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from hpo.errors import StorageError, did_you_mean, printable, shorten
from hpo.redaction import redact
from hpo.study.store.sqlite_place import check_place

DEFAULT_URL = "sqlite:///runs/hpo.db"
URL_FROM_FILE = "@"
BUSY_SECONDS = 60.0

_DRIVERS = {"sqlite": ("", "pysqlite"), "postgresql": ("", "psycopg", "psycopg2")}
"""What a URL may name. The URL of another program may say psycopg2: hpo connects with psycopg."""
_UNMISTAKABLE = 8
"""So many characters make a password longer than the usual words of a message, host or database."""
_EXAMPLES = "`sqlite:///runs/hpo.db` or `postgresql://user:password@host:5432/database`"


def storage_url(given: str | None = None) -> str:
    """Return the URL of the database: `given` (--storage), else HPO_STORAGE, else SQLite under runs/.

    `@FILE` stands for the URL in a file, so that no password is among a process's arguments and variables.
    Raises StorageError if the file cannot be read, others may read it, or it holds no URL.
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
    """Return `url` with its driver. Raises StorageError if it names neither a SQLite file nor PostgreSQL."""
    if problem := _problem_of_text(url):
        raise StorageError(problem)
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        raise StorageError(_no_url(url)) from None
    except ValueError:
        raise StorageError(_wrong_port(url)) from None
    backend, _, driver = parsed.drivername.partition("+")
    backend = {"postgres": "postgresql"}.get(backend, backend)
    if backend not in _DRIVERS:
        raise StorageError(
            f"The storage must be SQLite or PostgreSQL ({_EXAMPLES}), but `{redact(url)}` names `{backend}`."
            f"{did_you_mean(backend, [*_DRIVERS])}"
        )
    if driver not in _DRIVERS[backend]:
        raise StorageError(
            f"hpo connects to {backend} without the driver `{driver}`: write `{backend}://` in the URL."
        )
    check = _problem_of_sqlite if backend == "sqlite" else _problem_of_postgresql
    if problem := check(parsed, url):
        raise StorageError(problem)
    if backend == "sqlite":
        return parsed.set(drivername="sqlite")
    if not _has_database(parsed):
        parsed = parsed.set(database=parsed.username)  # as libpq does
    return parsed.set(drivername="postgresql+psycopg")


def _problem_of_text(url: str) -> str:
    if url != url.strip():
        return f"The storage URL must have no space around it, but is `{redact(printable(url.strip()))}`."
    if re.search(r"[\x00-\x1f\x7f]", unquote(url)):
        shown = shorten(redact(printable(url)), 200)
        return f"The storage URL must have no control character, but is `{shown}`."
    if url.count("sqlite://") > 1 or (url.count("://") > 1 and url.startswith("sqlite")):
        return f"The storage must be one URL, but is `{redact(url)}`."
    if re.search(r"(?i)postgres.*[?&]\w*(pass|secret)\w*=[^&]* ", url):  # not shown
        return "A storage URL must have each space of a password behind its `?` written as `%20`."
    # What follows the first one would be taken for the host, and shown.
    is_split = url.startswith("postgres") and url.count("@") > 1
    return "A storage URL must have each `@` in its password written as `%40`." if is_split else ""


def _no_url(url: str) -> str:
    """The message for a text that SQLAlchemy does not read as a URL."""
    if url.startswith("sqlite:"):
        return _wrong_slashes(url, url.removeprefix("sqlite:"))
    is_file = re.fullmatch(r"[^@:]*\.(db|sqlite3?)", url)
    near = f" Did you mean `sqlite:///{url}`?" if is_file else ""
    return f"The storage must be a URL such as {_EXAMPLES}, but it is `{redact(url)}`.{near}"


def _wrong_slashes(url: str, path: str) -> str:
    return (
        f"`{redact(url)}` names no file. A relative path needs three slashes, an absolute one four: "
        f"`sqlite:///{path}`."
    )


def _wrong_port(url: str) -> str:
    return f"{redact(url)}: the port must be a number from 1 to 65535. Check it, or leave it out."


def _problem_of_sqlite(parsed: sa.URL, url: str) -> str:
    file = parsed.database or ""
    if parsed.host:
        return _wrong_slashes(url, url.partition("://")[2])
    if file == ":memory:":
        return "A study in memory would be lost at the end of the command. Name a file: sqlite:///runs/hpo.db"
    if not file:
        return f"{url}: the storage URL must name a file, such as sqlite:///runs/hpo.db."
    if file.endswith("/") or Path(file).is_dir():
        return f"{url}: the storage URL must name a file, but `{file}` is a folder."
    refused = [f"`{name}`" for name in parsed.query if name == "timeout" or not file.startswith("file:")]
    if refused:
        return f"{url}: {', '.join(refused)} must be left out: hpo sets the options of SQLite itself."
    return ""


def _problem_of_postgresql(parsed: sa.URL, url: str) -> str:
    if parsed.port is not None and not 0 < parsed.port < 65536:
        return _wrong_port(url)
    if parsed.host and " " in parsed.host:
        return f"{redact(url)}: the host must have no space. Check it."
    if not parsed.username and not _has_database(parsed):
        shown = redact(url.partition("?")[0]).rstrip("/")
        shown = shown if not shown.endswith(":") else f"{shown}//"
        return f"The storage URL must name a database: {shown}/NAME"
    return ""


def _has_database(parsed: sa.URL) -> bool:
    elsewhere = "PGDATABASE" in os.environ or "PGSERVICE" in os.environ
    return bool(parsed.database) or elsewhere or bool({"dbname", "service"} & parsed.query.keys())


def without_password(url: str, text: str) -> str:
    """Return a message about the database at `url` without its password.

    It is hidden in URLs and behind `password=`. Elsewhere it is hidden only if nobody can mistake it for a
    word of the message or a part of the URL.
    """
    parsed = sa.make_url(url)
    password, others = str(parsed.password or ""), parsed.set(password="").render_as_string()
    text = redact(text)
    if len(password) >= _UNMISTAKABLE and not password.isalpha() and password not in others:
        for form in (password, quote(password, safe=""), quote_plus(password)):
            text = text.replace(form, "***")
    return text


def place(url: str) -> str:
    """Return `url` for messages, with the whole path of a SQLite file that it names by a relative one."""
    path = sqlite_path(parse_url(url))
    shown = redact(url)
    return shown if path is None or path.is_absolute() else f"{shown} ({path.absolute()})"


def check_folder(url: str) -> None:
    """Raise StorageError where the folder of a SQLite file does not exist, or is on a network file system."""
    path = sqlite_path(parse_url(url))
    if path is not None:
        if not path.parent.is_dir():
            raise StorageError(f"The folder `{path.parent}` of {redact(url)} must exist. Create it first.")
        check_place(path)


def connect(url: str) -> sa.Engine:
    """Return the database at `url` as it is, with whatever tables; an absent SQLite file is made."""
    parsed = parse_url(url)
    return with_bounds(sa.create_engine(parsed, pool=connection_pool(parsed)))


def with_bounds(engine: sa.Engine) -> sa.Engine:
    """Return the engine, whose transactions on PostgreSQL end if the client is silent (`connection`)."""
    if engine.dialect.name == "postgresql":
        from hpo.study.store.connection import bound_transaction

        sa.event.listen(engine, "begin", bound_transaction)
    return engine


def connection_pool(url: sa.URL) -> sa.Pool:
    """Connections to a database, as all of hpo has them."""
    if url.get_backend_name() == "sqlite":
        pool = sa.create_pool_from_url(url, connect_args={"timeout": BUSY_SECONDS})
        sa.event.listen(pool, "connect", _set_up_sqlite)
        return pool
    from hpo.study.store.connection import postgres_pool  # psycopg, which SQLite does without

    return postgres_pool(url)


def _set_up_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # With a write-ahead log readers never wait for the writer, and a commit needs no fsync: a power cut may
    # lose the last commits, never the database (https://www.sqlite.org/pragma.html#pragma_synchronous).
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            break
        except sqlite3.OperationalError as error:  # SQLite does not wait for another that turns on the log
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous=NORMAL").close()


def sqlite_path(url: sa.URL) -> Path | None:
    """Return the file of a SQLite database; None: it is none."""
    if url.get_backend_name() != "sqlite":
        return None
    return Path(str(url.database).removeprefix("file:"))


@contextmanager
def snapshot(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection of which all queries see the database as it was at the first of them."""
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execution_options(isolation_level="REPEATABLE READ")
        else:
            connection.exec_driver_sql("BEGIN")  # sqlite3 begins a transaction only before a change
        yield connection
