import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from support.worker_process import start_process

from hpo.cluster.postgres import postgres_server
from hpo.cluster.postgres.postgres_server import PostgresServer, find_programs, server_user
from hpo.errors import InputError
from hpo.study.store.database import storage_url

pytestmark = pytest.mark.postgres


def processes_with(text: str) -> list[Path]:
    """List the command lines and environments of processes that contain `text`."""
    found = []
    for file in (path for name in ("cmdline", "environ") for path in Path("/proc").glob(f"[0-9]*/{name}")):
        with suppress(OSError):  # the process has ended
            if text in file.read_text(errors="replace"):
                found.append(file)
    return found


def test_start_use_stop_and_restart(new_server: PostgresServer) -> None:
    unfinished = new_server.folder / "data.new"  # of a killed start
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("15\n")
    running = new_server.start()
    assert running.is_new
    assert not unfinished.exists()
    url = storage_url(f"@{new_server.url_file}")
    assert url == running.url
    with psycopg.connect(url) as connection:
        query = "SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = current_user"
        assert connection.execute(query).fetchone() == (False, False)
        assert int(connection.execute("SHOW max_connections").fetchone()[0]) >= 1000
        assert connection.execute("SHOW data_checksums").fetchone() == ("on",)
        connection.execute("CREATE TABLE results (value int)")
        password = connection.info.password
    assert stat.S_IMODE(new_server.url_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(new_server.data.stat().st_mode) == 0o700
    assert not processes_with(password)
    assert password not in new_server.log.read_text()

    again = PostgresServer(new_server.folder).start()
    assert (again.is_new, again.url, again.host) == (False, running.url, running.host)
    assert new_server.stop()
    assert new_server.running() is None
    assert not new_server.stop()

    assert new_server.start().url == url, "waiting workers can connect again"
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM results").fetchone() == (0,)


def test_connections_need_password(server: PostgresServer) -> None:
    running = server.start()
    password = f":{sa.make_url(running.url).password}@"
    superuser = running.url.replace("//hpo:", "//postgres:")
    for url in (running.url.replace(password, ":wrong@"), running.url.replace(password, "@"), superuser):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(url)
    server.stop()
    server.url_file.unlink()
    again = server.start()
    assert f":{sa.make_url(again.url).password}@" != password, "without the file there is a new password"


def test_connections_of_other_machines_need_tls(server: PostgresServer) -> None:
    assert "sslmode" not in server.start("localhost").url
    server.stop()
    running = server.start("0.0.0.0")
    assert "?sslmode=verify-full&sslrootcert=" in running.url
    with psycopg.connect(running.url) as connection:
        assert connection.pgconn.ssl_in_use
    with pytest.raises(psycopg.OperationalError, match="no encryption"):
        psycopg.connect(running.url.replace("verify-full", "disable"))
    assert stat.S_IMODE((server.data / "server.key").stat().st_mode) == 0o600


def start_as_nobody(folder: Path) -> None:
    sa.create_engine("postgresql+psycopg://").dispose()  # imports files that only root may read
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    server = PostgresServer(folder / "postgres")
    with psycopg.connect(server.start().url) as connection:
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            assert connection.execute(f"SHOW {name}").fetchone() == ("on",)
    assert server.data.stat().st_uid == os.geteuid()
    assert stat.S_IMODE(server.folder.stat().st_mode) & 0o077 == 0
    assert server.stop()


def test_start_as_ordinary_user(folder: Path) -> None:
    process = start_process(start_as_nobody, folder)
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must become another user")
def test_root_needs_another_user(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start()
    uid = server.data.stat().st_uid
    pid = (server.data / "postmaster.pid").read_text().split()[0]
    assert Path("/proc", pid).stat().st_uid == uid != 0

    def nobody(name: str) -> Any:
        raise KeyError(name)

    monkeypatch.setattr(postgres_server.pwd, "getpwnam", nobody)
    assert server_user(server.data)["user"] == uid, "a database keeps its user"
    with pytest.raises(InputError, match="PostgreSQL refuses to run as root"):
        PostgresServer(server.folder.parent / "other").start()


def test_find_newest_usable_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("initdb", "pg_ctl", "postgres"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) 99.1'\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    assert find_programs({}).version == (99, 1)
    if os.geteuid() == 0:
        assert find_programs({"user": 65534, "group": 65534}).version != (99, 1)
    (folder / "postgres").write_text("#!/bin/sh\nexit 3\n")
    assert find_programs({}).version != (99, 1)
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_programs({}).folder.is_relative_to("/usr"), "Debian and Red Hat install outside the PATH"
    with pytest.raises(InputError, match=r"PostgreSQL 9 must be installed, but this machine has 1\d in"):
        find_programs({}, 9)
    monkeypatch.setattr(postgres_server, "_INSTALLED_IN", ())
    with pytest.raises(InputError, match=r"this machine has none\. Install it"):
        find_programs({})
