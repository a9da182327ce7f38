"""Checks of a database, whatever its tables are: each takes its URL and yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from hpo.cluster.finding import Finding
from hpo.cluster.hosts import is_loopback
from hpo.errors import NoDatabaseError, StorageError
from hpo.study import schema
from hpo.study.database import connect, exclusive, explain, optuna_storage, parse_url, place, sqlite_path
from hpo.study.migrations import differences, newest_version, stored_version
from hpo.study.sqlite_place import check_place
from hpo.study.storage import open_storage


def database(url: str) -> Iterator[Finding]:
    """Whether it answers, and is asked over the network in a way that others cannot read."""
    parsed, engine = parse_url(url), connect(url)
    try:
        with engine.connect() as connection:
            if engine.dialect.name != "postgresql":
                return
            own = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            encrypted = connection.execute(sa.text(own)).scalar()
    except SQLAlchemyError as error:
        yield Finding("error", str(explain(url, error)))
        return
    finally:
        engine.dispose()
    if not encrypted and parsed.host and not parsed.host.startswith("/") and not is_loopback(parsed.host):
        yield Finding(
            "warning",
            f"The network can read what goes to and from the database on {parsed.host}: there is no TLS.",
            "Turn on TLS in the server (`hpo database start` does), with `?sslmode=verify-full` in the URL.",
        )


def sqlite_on_network(url: str) -> Iterator[Finding]:
    """`open_database` refuses it."""
    path = sqlite_path(parse_url(url))
    try:
        if path is not None:
            check_place(path)
    except StorageError as error:
        yield Finding("error", str(error))


def tables_of_optuna(url: str) -> Iterator[Finding]:
    """Their version; a later Optuna moves them up, which old workers do not survive."""
    engine = connect(url)
    try:
        if not sa.inspect(engine).has_table("version_info"):
            return
    finally:
        engine.dispose()
    backend = optuna_storage(parse_url(url), skip_compatibility_check=True, skip_table_creation=True)
    try:
        current, newest = backend.get_current_version(), backend.get_head_version()
        known = backend.get_all_versions()
    finally:
        backend.engine.dispose()
    if current == newest:
        return
    what = f"The tables of Optuna must be of version {newest}, but are of {current}."
    if current not in known:
        yield Finding("error", what, "Update Optuna, or name another database.")
        return

    def upgrade() -> None:
        backend.upgrade()
        backend.engine.dispose()

    remedy = "Moves them up. End all workers first: those of an earlier Optuna cannot go on."
    yield Finding("error", what, remedy, upgrade)


def tables_of_hpo(url: str) -> Iterator[Finding]:
    """Their version, whether all are there, and whether they are what this hpo makes."""
    engine = connect(url)
    try:
        with engine.connect() as connection:
            present = set(sa.inspect(connection).get_table_names()) & set(schema.metadata.tables)
            version = stored_version(connection)
            differ = differences(connection) if version == newest_version() else {}
    except StorageError as error:  # a later hpo made them
        yield Finding("error", str(error))
        return
    finally:
        engine.dispose()
    if version is None and not present:
        raise NoDatabaseError(f"{place(url)} holds no study yet. `hpo run STUDY` makes one.")
    make = partial(_make_tables, url)
    if version is None:
        missing = ", ".join(sorted(set(schema.metadata.tables) - present))
        yield Finding("error", f"Tables of hpo are missing: {missing}.", "Makes them, empty.", make)
    elif version != newest_version():
        what = f"The tables of hpo must be of version {newest_version()}, but are of {version}."
        yield Finding("error", what, "Moves them up; nothing stored is lost.", make)
    for what, is_missing_table in differ.items():
        if is_missing_table:
            yield Finding("error", what, "Makes it, empty.", make)
        else:
            yield Finding("error", what, "Restore a backup: `hpo database restore`.")


def _make_tables(url: str) -> None:
    open_storage(url).close()
    engine = connect(url)
    try:
        with exclusive(engine), engine.begin() as connection:
            schema.metadata.create_all(connection)
    finally:
        engine.dispose()
