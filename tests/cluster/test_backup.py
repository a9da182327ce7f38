"""A database as one file and back, of both kinds."""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from postgres import PASSWORD, PostgresServer
from whole_study import contents, filled
from worker_process import finish, notes, start, study, wait_for

from hpo.cluster import backup as backups
from hpo.cluster.backup import backup, restore
from hpo.cluster.postgres_programs import Programs
from hpo.errors import InputError, NoDatabaseError, StorageError
from hpo.study import connection, copy
from hpo.study.leases import WorkerLease
from hpo.study.storage import open_storage


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """A function that makes one more empty database of the same kind."""
    if request.param == "sqlite":
        names = iter("abcdef")
        yield lambda: f"sqlite:///{tmp_path / next(names)}.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    databases = []

    def make() -> str:
        databases.append(server.database())
        return databases[-1].__enter__()

    yield make
    for database in databases:
        database.__exit__(None, None, None)


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()


def test_whole(url: str, new_url: Callable[[], str], tmp_path: Path) -> None:
    file = tmp_path / "backup"
    with open_storage(url) as storage:
        filled(storage)
        storage.put_compat("key", {"a": 1})
        before = contents(storage)
    assert backup(url, file) == {"tiny": 6}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} & {"backup", "backup-wal", "backup-shm"} == {"backup"}
    assert not list(tmp_path.glob(".backup-*"))

    other = new_url()
    assert restore(file, other) == {"tiny": 6}
    with open_storage(other) as storage:
        assert contents(storage) == before
        assert storage.get_compat("key") == {"a": 1}
        storage.create_or_resume_study(study(2, name="next"))  # ids go on
        opened = storage.load_study("tiny")
        opened.enqueue_trial({})
        assert [trial.number for trial in opened.trials] == list(range(7))


def test_while_workers_write(url: str, new_url: Callable[[], str], tmp_path: Path) -> None:
    config, log, file = study(12), tmp_path / "log", tmp_path / "backup"
    open_storage(url).close()
    workers = [start(url, config, log, trial_seconds=0.5) for _ in range(2)]
    wait_for(lambda: len(notes(log)) >= 3)
    taken = backup(url, file)
    assert len(notes(log)) < config.n_trials, "the workers were too fast to test anything"
    finish(*workers)
    other = new_url()
    assert restore(file, other) == taken
    with open_storage(other) as storage:
        record = storage.read_study("tiny")
        assert 3 <= len(record.trials) == taken["tiny"] <= 12
        assert all(trial.values for trial in record.trials if trial.state == "COMPLETE")
    finish(start(other, config, tmp_path / "other log"))
    with open_storage(other) as storage:
        assert storage.slot_counts("tiny")["done"] == 12


@pytest.mark.postgres
def test_of_a_database_that_takes_long_to_dump(
    postgres_url: str, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transactions that wait are not ended meanwhile, neither of a backup nor of a copy."""
    open_storage(postgres_url).close()  # its tables take a while
    monkeypatch.setattr(connection, "_SESSION", "SET idle_in_transaction_session_timeout = '300ms'")

    def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            time.sleep(1)  # longer than the server would wait
            return call(*arguments, **options)

        return slow

    monkeypatch.setattr(backups, "_run", slowly(backups._run))
    monkeypatch.setattr(copy, "_copy_optunas", slowly(copy._copy_optunas))
    with (
        open_storage(sqlite_url) as source,
        open_storage(postgres_url) as target,
        open_storage(f"sqlite:///{tmp_path}/back.db") as back,
    ):
        filled(source)
        copy.copy_study(source, target, "tiny")
        assert copy.copy_study(target, back, "tiny").num_trials == 6
    assert backup(postgres_url, tmp_path / "backup") == {"tiny": 6}


def test_studies_are_not_lost_unasked(url: str, new_url: Callable[[], str], tmp_path: Path) -> None:
    file, other = tmp_path / "backup", new_url()
    with open_storage(url) as storage:
        filled(storage)
        before = contents(storage)
    backup(url, file)
    with open_storage(other) as storage:
        storage.create_or_resume_study(study(2, name="precious")).enqueue_trial({})
        with storage.engine.begin() as connection:  # of a later version
            connection.execute(sa.text("CREATE TABLE hpo_later (a INTEGER)"))
    with pytest.raises(
        StorageError, match=r"must be empty, but has precious \(1 trials\)\. --force replaces"
    ):
        restore(file, other)
    with open_storage(other) as storage:
        opened = storage.load_study("precious")
        with (
            WorkerLease(storage, opened, max_retries=0),
            pytest.raises(StorageError, match=r"Workers are live in precious in .*Stop them first"),
        ):
            restore(file, other, force=True)
        assert storage.has_study("precious")
    assert restore(file, other, force=True) == {"tiny": 6}
    with open_storage(other) as storage:
        assert contents(storage) == before
        assert "hpo_later" not in sa.inspect(storage.engine).get_table_names()


def test_tables_without_a_study_are_empty(url: str, new_url: Callable[[], str], tmp_path: Path) -> None:
    file, other = tmp_path / "backup", new_url()
    open_storage(url).close()
    assert backup(url, file) == {}
    open_storage(other).close()
    assert restore(file, other) == {}
    open_storage(other, create=False).close()


def test_a_damaged_backup_changes_nothing(url: str, new_url: Callable[[], str], tmp_path: Path) -> None:
    file, other = tmp_path / "backup", new_url()
    with open_storage(url) as storage:
        filled(storage, 200)
    backup(url, file)
    with open_storage(other) as storage:
        storage.create_or_resume_study(study(2, name="precious"))
    whole = file.read_bytes()
    for share in (0.3, 0.9):
        file.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(InputError, match=r"backup .*(damaged|cannot be read)"):
            restore(file, other, force=True)
        with open_storage(other, create=False) as storage:
            assert storage.slot_counts("precious")["open"] == 2


def test_a_backup_that_fails_leaves_the_one_before(url: str, tmp_path: Path) -> None:
    file = tmp_path / "backup"
    file.write_text("the one before")
    with pytest.raises(NoDatabaseError):
        backup(url, file)
    assert file.read_text() == "the one before"
    assert not list(tmp_path.glob(".backup-*"))
    open_storage(url).close()
    with pytest.raises(InputError, match="must be a file that may be written: No such file"):
        backup(url, tmp_path / "absent" / "backup")


@pytest.mark.postgres
def test_of_another_kind(postgres_url: str, sqlite_url: str, tmp_path: Path) -> None:
    file = tmp_path / "backup"
    for url, other in ((postgres_url, sqlite_url), (sqlite_url, postgres_url)):
        open_storage(url).close()
        backup(url, file)
        with pytest.raises(
            InputError, match=r"must be restored to such a database.*`hpo copy` takes a study"
        ):
            restore(file, other)


def test_what_is_no_backup(sqlite_url: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("This is none.")
    for file, message in (
        (text, "wrote, but it is none"),
        (tmp_path, "Is a directory"),
        (tmp_path / "absent", "No such file"),
    ):
        with pytest.raises(InputError, match=message):
            restore(file, sqlite_url)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(InputError, match="has no study in it"):
        restore(foreign, sqlite_url)
    assert not (tmp_path / "hpo.db").exists()


@pytest.mark.postgres
def test_programs_do_not_show_the_password(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    run = Programs.run

    def spy(self: Programs, program: str, *arguments: object, **options: Any) -> Any:
        seen.extend((program, *map(str, arguments), *options["env"].values()))
        return run(self, program, *arguments, **options)

    monkeypatch.setattr(Programs, "run", spy)
    monkeypatch.setenv("HPO_STORAGE", postgres_url)
    open_storage(postgres_url).close()
    backup(postgres_url, tmp_path / "backup")
    restore(tmp_path / "backup", postgres_url)
    assert {"pg_dump", "pg_restore"} <= set(seen)
    assert not any(PASSWORD in text or "p%25" in text for text in seen)
