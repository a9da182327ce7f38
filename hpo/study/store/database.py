"""URLs of databases, and connections to them.

SQLite and PostgreSQL use one path: SQLAlchemy. A URL holds a password, so every message redacts it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from hpo.errors import StorageError, did_you_mean, printable, shorten
from hpo.redaction import redact
from hpo.study.store.connection import bound_transaction, connection_pool
from hpo.study.store.sqlite_disk import check_disk

DEFAULT_URL = "sqlite:///runs/hpo.db"
URL_FROM_FILE = "@"

_DRIVERS = {"sqlite": ("", "pysqlite"), "postgresql": ("", "psycopg", "psycopg2")}
"""Accepted drivers. A URL for another program may name psycopg2; hpo connects with psycopg."""
_MIN_MASKED = 8
"""Shorter passwords may equal an ordinary word of a message, so they are not masked there."""
_EXAMPLES = "`sqlite:///runs/hpo.db` or `postgresql://user:password@host:5432/database`"
_SLASH_RULE = "a relative path needs three slashes (sqlite:///hpo.db), an absolute one four"
_PORT_RULE = "the port must be a number from 1 to 65535"


def storage_url(given: str | None = None) -> str:
    """Return the URL of the database: `given` (--storage), else HPO_STORAGE, else SQLite under runs/.

    `@FILE` means the URL in a file, which keeps the password out of arguments and variables.
    Raises StorageError if the file cannot be read, is readable for others, or holds no URL.
    """
    url = given or os.environ.get("HPO_STORAGE") or DEFAULT_URL
    return _url_in(Path(url.removeprefix(URL_FROM_FILE))) if url.startswith(URL_FROM_FILE) else url


def _url_in(file: Path) -> str:
    try:
        with file.open() as opened:
            about, text = os.fstat(opened.fileno()), opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise StorageError(f"The file `{file}` must hold the URL of the storage, but: {why}.") from None
    # A group may read a file of root: Kubernetes hands out secrets like this.
    if about.st_mode & (0o027 if about.st_uid == 0 else 0o077):
        raise StorageError(
            f"The file `{file}` holds a password, so only its owner may read it, but its mode is "
            f"{about.st_mode & 0o777:04o}. Run `chmod 600 {file}`."
        )
    if not re.fullmatch(r"\w+(\+\w+)?://\S.*", text):  # not shown: it may be the password
        raise StorageError(f"The file `{file}` must hold the URL of the storage ({_EXAMPLES}) in one line.")
    return text


def parse_url(url: str) -> sa.URL:
    """Return `url` with its driver. Raises StorageError unless it names a SQLite file or PostgreSQL."""
    if url != url.strip() or re.search(r"[\x00-\x1f\x7f]", unquote(url)):
        shown = shorten(redact(printable(url.strip())), 200)
        raise StorageError(
            f"The storage URL must have no space around it and no control character, but is `{shown}`."
        )
    space_in_password = r"(?i)[?&]\w*(pass|secret)\w*=[^&]* "
    if url.startswith("postgres") and (url.count("@") > 1 or re.search(space_in_password, url)):
        # Not shown: a part of the password may look like the host.
        raise StorageError("In the storage URL, write `@` in a password as `%40` and a space as `%20`.")
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        raise _no_url(url) from None
    except ValueError:
        raise _unusable(url, _PORT_RULE) from None
    backend, _, driver = parsed.drivername.partition("+")
    backend = "postgresql" if backend == "postgres" else backend
    if backend not in _DRIVERS:
        raise _unusable(url, f"it names `{backend}`", did_you_mean(backend, [*_DRIVERS]))
    if driver not in _DRIVERS[backend]:
        raise StorageError(
            f"hpo does not use the driver `{driver}`. Write `{backend}://` in the storage URL."
        )
    if backend == "sqlite":
        _check_sqlite(parsed, url)
        return parsed.set(drivername="sqlite")
    return _checked_postgresql(parsed, url)


def _unusable(url: str, problem: str, advice: str = "") -> StorageError:
    return StorageError(
        f"The storage must be a URL such as {_EXAMPLES}, but got `{redact(url)}`: {problem}.{advice}"
    )


def _no_url(url: str) -> StorageError:
    if url.startswith("sqlite:"):
        return _unusable(url, _SLASH_RULE)
    is_file = re.fullmatch(r"[^@:]+\.(db|sqlite3?)", url)
    return _unusable(url, "it is no URL", f" Did you mean `sqlite:///{url}`?" if is_file else "")


def _check_sqlite(parsed: sa.URL, url: str) -> None:
    file = parsed.database or ""
    if url.count("://") > 1:  # the password of the other URL would be a part of the file's name
        raise _unusable(url, "it must be one URL")
    if parsed.host:
        raise _unusable(url, _SLASH_RULE)
    if not file or file == ":memory:" or file.endswith("/") or Path(file).is_dir():
        raise _unusable(url, "it must name a file")
    refused = [name for name in parsed.query if name == "timeout" or not file.startswith("file:")]
    if refused:
        raise _unusable(url, f"hpo sets the options of SQLite itself. Leave out `{refused[0]}`")


def _checked_postgresql(parsed: sa.URL, url: str) -> sa.URL:
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise _unusable(url, _PORT_RULE)
    if " " in (parsed.host or ""):
        raise _unusable(url, "the host must have no space")
    elsewhere = {"PGDATABASE", "PGSERVICE"} & os.environ.keys() | {"dbname", "service"} & parsed.query.keys()
    if not parsed.database and not elsewhere:
        if not parsed.username:
            raise _unusable(url, "it must name a database")
        parsed = parsed.set(database=parsed.username)  # libpq's rule
    return parsed.set(drivername="postgresql+psycopg")


def without_password(url: str, text: str) -> str:
    """Return a message about the database at `url` without its password.

    It is hidden in URLs and after `password=`. Elsewhere it is hidden only if it cannot be an ordinary word
    of the message or a part of the URL.
    """
    parsed = sa.make_url(url)
    password, others = str(parsed.password or ""), parsed.set(password="").render_as_string()
    text = redact(text)
    if len(password) >= _MIN_MASKED and not password.isalpha() and password not in others:
        for form in (password, quote(password, safe=""), quote_plus(password)):
            text = text.replace(form, "***")
    return text


def shown_url(url: str) -> str:
    """Return `url` for messages, with the absolute path of a SQLite file."""
    path = sqlite_path(parse_url(url))
    shown = redact(url)
    return shown if path is None or path.is_absolute() else f"{shown} ({path.absolute()})"


def check_folder(url: str) -> None:
    """Raise StorageError if the folder of a SQLite file is missing or on a network file system."""
    path = sqlite_path(parse_url(url))
    if path is not None:
        if not path.parent.is_dir():
            raise StorageError(f"The folder `{path.parent}` of {redact(url)} must exist. Create it first.")
        check_disk(path)


def connect(url: str) -> sa.Engine:
    """Return an engine for the database at `url`. A missing SQLite file is created."""
    parsed = parse_url(url)
    engine = sa.create_engine(parsed, pool=connection_pool(parsed))
    if engine.dialect.name == "postgresql":
        sa.event.listen(engine, "begin", bound_transaction)
    return engine


def sqlite_path(url: sa.URL) -> Path | None:
    """Return the file of a SQLite database, or None for PostgreSQL."""
    if url.get_backend_name() != "sqlite":
        return None
    return Path(str(url.database).removeprefix("file:"))


@contextmanager
def snapshot(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Yield a connection whose queries all see the database as it was at the first query."""
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execution_options(isolation_level="REPEATABLE READ")
        else:
            connection.exec_driver_sql("BEGIN")  # sqlite3 begins a transaction only before a change
        yield connection
