"""Errors of a database: their meaning for the user, and if the database may work again soon."""

import json
import re
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from hpo.errors import HpoError, RunError, StorageError, shorten
from hpo.redaction import redact
from hpo.study.store.database import without_password

DATABASE_ERRORS = (SQLAlchemyError, StorageInternalError)  # the exceptions of a call to the database
_LOST_BEFORE = "8s2b"  # SQLAlchemy's code: the connection was lost before this statement of a transaction
_READ_ONLY = "25006"  # PostgreSQL's code: the server is not the primary, or not any more

# Pattern of the driver's message -> requirement and remedy.
_UNREACHABLE = {
    r"failed to resolve host|could not translate host|name or service not known|getaddrinfo": (
        "the host cannot be found. Check its name in the storage URL"
    ),
    r"connection refused|timeout expired|connection timeout|no route to host|network is unreachable": (
        "no database answers there. Check host and port, and that the server runs"
    ),
    r"readonly database|read-only transaction": (
        "the database and SQLite's folder must be writable. Change the permissions or name another database"
    ),
}
"""Wrong input for a command. For a worker, the database may be away."""
_WRONG_INPUT = {
    r"password authentication failed|no password supplied": (
        "the server refuses this user and password. Check both in the storage URL"
    ),
    r'database "[^"]*" does not exist': "the server has no such database. Create it, e.g. with `createdb`",
    r"certificate|ssl|no pg_hba.conf entry|connection option|invalid (\S+ value|integer|port|command-line)|"
    "(bad|invalid) value for|non-integer port|unrecognized configuration": (
        "the server and the URL's port and options must fit. Check the part after `?`, such as `sslmode` and "
        "`sslrootcert`, and the server's pg_hba.conf"
    ),
    r"permission denied for|must be owner": (
        "the user must be allowed to create tables and to write them. Grant it, e.g. with "
        "`GRANT CREATE, USAGE ON SCHEMA public TO user`"
    ),
    r"unable to open database file|file is not a database|malformed": (
        "it must be a SQLite database. Its folder must exist, and both must be writable"
    ),
}
_BLOCKED = {
    r"database is locked": "another program holds it locked. End that, or use PostgreSQL for many workers",
    r"disk is full|no space left|could not extend file": "its disk is full. Make room, then run this again",
}


def explain(url: str, error: BaseException) -> HpoError:
    """Return an error whose message explains `error` to the user, without the password."""
    text = without_password(url, _text(error))
    for kind, failures in ((StorageError, _WRONG_INPUT | _UNREACHABLE), (RunError, _BLOCKED)):
        if advice := _find(failures, text):
            return kind(f"{redact(url)}: {advice}. ({shorten(text, 300)})")
    return RunError(f"{redact(url)}: the database gave an error: {shorten(text, 500)}")


def is_outage(error: BaseException) -> bool:
    """Return true if the database may work again soon: a restart, lost connection, long lock or failover."""
    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    # Optuna repeats a failed first query in the same transaction, which hides the first error.
    if getattr(error, "connection_invalidated", False) or getattr(error, "code", None) == _LOST_BEFORE:
        return True
    if getattr(_driver_error(error), "sqlstate", None) == _READ_ONLY:
        return True
    if not isinstance(error, OperationalError):
        return False
    return not isinstance(error.orig, sqlite3.Error) or is_locked(error)


def is_locked(error: BaseException) -> bool:
    """Return true if another program has the SQLite database locked."""
    error = _driver_error(error)
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def is_wrong_input(error: BaseException) -> bool:
    """Return true if the user must change something first."""
    return _find(_WRONG_INPUT, _text(error)) is not None


def _find(failures: Mapping[str, str], text: str) -> str | None:
    return next((failures[pattern] for pattern in failures if re.search(pattern, text, re.IGNORECASE)), None)


def _text(error: BaseException) -> str:
    return " ".join(str(_driver_error(error)).split())


def _driver_error(error: BaseException) -> BaseException:
    while True:
        is_optunas = isinstance(error, StorageInternalError)
        inner = getattr(error, "orig", None) or (error.__cause__ if is_optunas else None)
        if inner is None:
            return error
        error = inner


def decoded(text: str, name: str, decode: Callable[[str], Any] = json.loads) -> Any:
    """Decode a stored value. Raises StorageError with its `name` if it is damaged."""
    try:
        return decode(text)
    except (ValueError, LookupError, TypeError) as error:
        raise StorageError(
            f"{name} is damaged: {shorten(text, 60)} ({error}). Somebody has changed the database. Restore "
            "it from a copy, or delete the study."
        ) from None


def json_object(text: str) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise TypeError("it must be a JSON object")
    return content


def definition_of(study: str, text: str) -> dict[str, Any]:
    """Decode the stored definition of a study. Raises StorageError if it is damaged."""
    definition: dict[str, Any] = decoded(text, f"The definition of the study `{study}`", json_object)
    return definition
