"""A study database as one file, and back.

For PostgreSQL its own programs write and read it: `pg_dump`, in its custom format, of the server's major
version, because `pg_restore` reads those of its own and of earlier versions. SQLite has a call for it. Both
see one state of the database while workers write to it.

A backup may come from elsewhere, so it is not made a script for `psql`, which could run programs here;
`pg_restore` sends statements alone, to a role that needs no more rights than to make tables.
"""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import sqlalchemy as sa
from optuna.storages._rdb import models
from sqlalchemy.exc import SQLAlchemyError

from hpo.cluster.postgres_programs import INSTALL, Programs, environment, find_programs
from hpo.errors import InputError, NoDatabaseError, StorageError, shorten
from hpo.study import schema
from hpo.study.database import (
    BUSY_SECONDS,
    allow_idle,
    check_folder,
    connect,
    explain,
    parse_url,
    place,
    redact,
    snapshot,
    sqlite_path,
)
from hpo.study.storage import open_storage

_HEADS = {b"PGDMP": "PostgreSQL", b"SQLite format 3\0": "SQLite"}


def backup(url: str, file: Path) -> dict[str, int]:
    """Write the database at `url` to `file`, whole or not at all; return the number of trials of its studies.

    Raises:
        InputError: the file cannot be written, or PostgreSQL's programs are not there.
        StorageError: there is no database.
        RunError: it could not be read, or the disk is full.
    """
    file = file.absolute()
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")  # 0600
    except OSError as error:
        raise InputError(f"The backup {file} must be a file that may be written: {error.strerror}.") from None
    new = Path(name)
    try:
        with _connected(url) as (engine, connection):
            studies = _studies(connection)
            if studies is None:
                raise NoDatabaseError(f"{place(url)} holds no study yet: there is nothing to back up.")
            if path := sqlite_path(engine.url):
                _copy_sqlite(path, new)
                with closing(sqlite3.connect(new)) as made:
                    made.execute("PRAGMA journal_mode=DELETE").close()  # one file, also while it is read
            else:
                allow_idle(connection)  # while pg_dump runs
                exported = connection.exec_driver_sql("SELECT pg_export_snapshot()").scalar_one()
                options = ("--format=custom", f"--snapshot={exported}", f"--file={new}")
                _run(_programs(connection), "pg_dump", *options, url=url)
        os.fsync(handle)
        new.replace(file)
    except (OSError, sqlite3.Error, SQLAlchemyError) as error:
        raise explain(url, error) from error
    finally:
        os.close(handle)
        new.unlink(missing_ok=True)
    return studies


def restore(file: Path, url: str, *, force: bool = False) -> dict[str, int]:
    """Fill the database at `url` with that of `file`; return the number of trials of the studies in it then.

    Args:
        force: replace the studies that are there.

    Raises:
        InputError: the file is no backup of such a database; the database has studies (without `force`), or
            workers are live in them.
        RunError: it could not be written; it is as it was.
    """
    file = file.absolute()
    path = sqlite_path(parse_url(url))
    _check_kind(file, "PostgreSQL" if path is None else "SQLite")
    check_folder(url)
    try:
        if path is None or path.exists():
            _refuse_loss(url, force=force)
        if path is None:
            _restore_postgres(file, url)
        else:
            _restore_sqlite(file, path)
        with _connected(url) as (_, connection):
            return _studies(connection) or {}
    except (OSError, sqlite3.Error, SQLAlchemyError) as error:
        raise explain(url, error) from error


@contextmanager
def _connected(url: str) -> Iterator[tuple[sa.Engine, sa.Connection]]:
    """A database as it is, with tables of whatever version."""
    path = sqlite_path(parse_url(url))
    if path is not None and not path.exists():
        raise NoDatabaseError(f"There is no database at {place(url)}.")
    engine = connect(url)
    try:
        with snapshot(engine) as connection:
            yield engine, connection
    finally:
        engine.dispose()


def _studies(connection: sa.Connection) -> dict[str, int] | None:
    """Study -> number of its trials; None where there are no tables."""
    study, trial = models.StudyModel, models.TrialModel
    if not sa.inspect(connection).has_table(study.__tablename__):
        return None
    query = sa.select(study.study_name, sa.func.count(trial.trial_id)).outerjoin(trial)
    rows = connection.execute(query.group_by(study.study_name).order_by(study.study_name))
    return {row[0]: row[1] for row in rows}


def _check_kind(file: Path, wanted: str) -> None:
    try:
        with file.open("rb") as opened:
            head = opened.read(16)
    except OSError as error:
        raise InputError(f"The backup {file} must be a file that can be read: {error.strerror}.") from None
    found = next((name for start, name in _HEADS.items() if head.startswith(start)), None)
    if found is None:
        raise InputError(f"{file} must be a file that `hpo database backup` wrote, but it is none.")
    if found != wanted:
        raise InputError(
            f"{file} is a backup of {found} and must be restored to such a database, not to {wanted}. "
            "`hpo copy` takes a study from one to the other."
        )


def _refuse_loss(url: str, *, force: bool) -> None:
    with _connected(url) as (_, connection):
        studies = _studies(connection)
        has_workers = sa.inspect(connection).has_table(schema.workers.name)
    if has_workers:
        with open_storage(url, create=False) as storage, storage.engine.connect() as connection:
            live = [name for name in studies or {} if storage.live_workers(connection, name)]
        if live:
            raise StorageError(f"Workers are live in {', '.join(live)} in {redact(url)}. Stop them first.")
    if studies and not force:
        lost = ", ".join(f"{name} ({count} trials)" for name, count in studies.items())
        raise StorageError(
            f"{redact(url)} must be empty, but has {lost}. --force replaces them: they are lost. Or name an "
            "empty database."
        )


def _check_tables(file: Path, tables: set[str]) -> None:
    if not {models.StudyModel.__tablename__, schema.studies.name} <= tables:
        raise InputError(f"{file} must be a backup of a study database, but has no study in it.")


def _copy_sqlite(source: Path, target: Path) -> None:
    """Replace all that `target` holds, at once."""
    with (
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as reading,
        closing(sqlite3.connect(target, timeout=BUSY_SECONDS)) as writing,
    ):
        reading.backup(writing)


def _restore_sqlite(file: Path, path: Path) -> None:
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as reading:
        try:
            problem = reading.execute("PRAGMA quick_check").fetchone()[0]
            tables = {row[0] for row in reading.execute("SELECT name FROM sqlite_master")}
        except sqlite3.DatabaseError as error:
            problem = str(error)
    if problem != "ok":
        raise InputError(f"The backup {file} is damaged: {shorten(problem, 200)}")
    _check_tables(file, tables)
    _copy_sqlite(file, path)


def _restore_postgres(file: Path, url: str) -> None:
    with _connected(url) as (_, connection):
        before = set(sa.inspect(connection).get_table_names())
        programs = _programs(connection)
    in_backup = set(re.findall(r" TABLE public (\S+) ", _run(programs, "pg_restore", "--list", file)))
    _check_tables(file, in_backup)
    whole = ("--single-transaction", "--exit-on-error")
    options = ("--clean", "--if-exists", "--no-owner", "--no-acl", *whole, "--dbname=service=hpo")
    _run(programs, "pg_restore", *options, file, url=url)
    engine = connect(url)
    with engine.begin() as connection:  # tables of a later version, which would not go with the others
        for name in sorted(before - in_backup):
            if name.startswith("hpo_"):
                connection.execute(sa.schema.DropTable(sa.Table(name, sa.MetaData())))
    engine.dispose()


# PostgreSQL's programs


def _programs(connection: sa.Connection) -> Programs:
    """Of the server's major version, else of the next one that is there."""
    major = int(connection.exec_driver_sql("SHOW server_version_num").scalar_one()) // 10000
    needed = ("pg_dump", "pg_restore")
    found = [one for one in find_programs(needed=needed) if one.major >= major]
    if not found:
        raise InputError(
            f"The server is PostgreSQL {major}, and `pg_dump` and `pg_restore` must be of that version or a "
            f"later one, but this machine has none. {INSTALL}."
        )
    return min(found, key=lambda one: one.major)


def _run(programs: Programs, program: str, *arguments: object, url: str | None = None) -> str:
    """Run a program and return what it prints; `url` is known to it as the service `hpo`.

    Neither its arguments nor its variables hold the password: others can list them.
    """
    with tempfile.TemporaryDirectory(prefix="hpo-") as folder:
        variables = environment()
        if url is not None:
            service = Path(folder, "service")
            service.touch(mode=0o600)
            keywords = "".join(f"{key}={value}\n" for key, value in _keywords(url).items())
            service.write_text(f"[hpo]\n{keywords}")
            variables |= {"PGSERVICEFILE": str(service), "PGSERVICE": "hpo"}
        done = programs.run(program, *arguments, env=variables)
    if done.returncode and re.search("input file|archive|compress", done.stderr):
        raise InputError(f"The backup {arguments[-1]} cannot be read: {shorten(done.stderr, 300)}")
    if done.returncode:
        raise explain(url or "", RuntimeError(done.stderr))
    return done.stdout


def _keywords(url: str) -> dict[str, object]:
    """What the URL says, in libpq's words."""
    parsed = parse_url(url)
    named = {
        "host": parsed.host,
        "port": parsed.port,
        "user": parsed.username,
        "password": parsed.password,
        "dbname": parsed.database,
    }
    return {key: value for key, value in named.items() if value is not None} | dict(parsed.query)
