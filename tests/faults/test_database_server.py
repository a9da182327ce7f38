"""What can be wrong with a private PostgreSQL: each gives one clear error, and costs no database."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from command_line import Finished, finish, start_hpo, wait_until
from worker_process import study

from hpo.cluster import hosts, postgres_programs, postgres_server
from hpo.cluster.postgres_programs import Programs, find_programs, server_user
from hpo.cluster.postgres_server import PostgresServer
from hpo.errors import HpoError, InputError, RunError
from hpo.study.storage import open_storage

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(not find_programs(), reason="PostgreSQL's server programs are not installed"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter; those of pytest are closed to them."""
    made = Path(tempfile.mkdtemp(prefix="hpo-test-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def server(folder: Path) -> Iterator[PostgresServer]:
    server = PostgresServer(folder / "postgres", {"fsync": "off"})
    yield server
    server.stop()


def refusal(server: PostgresServer, *args: Any, **options: Any) -> HpoError:
    with pytest.raises(HpoError) as raised:
        server.start(*args, **options)
    assert len(str(raised.value)) < 700
    assert "\n" not in str(raised.value)
    return raised.value


# The command in a job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_job_serves_until_its_signal(folder: Path, number: signal.Signals) -> None:
    server = PostgresServer(folder / "postgres")
    job = start_hpo(folder, "database", "start", "--foreground", "--folder", "postgres")
    wait_until(server.url_file.exists, job)
    url = server.url_file.read_text().strip()
    with open_storage(url) as storage:  # a client that stays does not keep it
        storage.create_or_resume_study(study(2))
        job.send_signal(number)
        ended = finish(job)
    assert ended.exit_code == 0, ended.err
    assert str(sa.make_url(url).password) not in ended.out + ended.err
    assert f"export HPO_STORAGE=@{server.url_file}" in ended.out
    assert server.running() is None
    assert "database system is shut down" in server.log.read_text().splitlines()[-1]
    assert not (server.data / "postmaster.pid").exists()


def test_a_job_ends_when_its_server_does(folder: Path) -> None:
    server = PostgresServer(folder / "postgres")
    job = start_hpo(folder, "database", "start", "--foreground", "--folder", "postgres")
    wait_until(server.url_file.exists, job)
    assert server.stop()
    ended = finish(job)
    assert ended.exit_code == 1
    assert "Error: The database has ended by itself" in ended.err


def test_two_that_start_at_once(folder: Path) -> None:
    both = [start_hpo(folder, "database", "start", "--folder", "postgres") for _ in range(2)]
    ended: list[Finished] = [finish(process) for process in both]
    server = PostgresServer(folder / "postgres")
    try:
        assert [one.exit_code for one in ended] == [0, 0], ended
        assert sorted("runs already" in one.out for one in ended) == [False, True]
        lines = server.log.read_text().splitlines()
        assert sum("ready to accept connections" in line for line in lines) == 1
    finally:
        assert server.stop()


def test_workers_wait_for_a_restart(server: PostgresServer) -> None:
    running = server.start()
    with open_storage(running.url) as storage:
        storage.create_or_resume_study(study(2))
        assert server.stop()
        running.process.wait(60)  # type: ignore[union-attr]
        running = server.start()
        assert storage.slot_counts("tiny")["open"] == 2
    assert server.stop()
    running.process.wait(60)  # type: ignore[union-attr]


# Folders


def test_a_folder_with_something_else(server: PostgresServer) -> None:
    server.folder.mkdir()
    (server.folder / "thesis.tex").write_text("years")
    error = refusal(server)
    assert isinstance(error, InputError)
    assert "must be empty or made by `hpo database start`, but it holds thesis.tex" in str(error)
    assert (server.folder / "thesis.tex").read_text() == "years"


def test_a_file_in_place_of_the_folder(server: PostgresServer) -> None:
    server.folder.write_text("a file")
    assert "must be a folder that may be written" in str(refusal(server))


@pytest.mark.skipif(os.geteuid() != 0, reason="the server of another user than root may enter")
def test_a_folder_that_the_servers_user_cannot_enter(folder: Path) -> None:
    folder.chmod(0o700)
    error = refusal(PostgresServer(folder / "postgres"))
    assert isinstance(error, InputError)
    assert "the server's user must be able to reach the folder" in str(error)
    assert not (folder / "postgres" / "data").exists()


def test_data_of_another_major_version(server: PostgresServer) -> None:
    server.data.mkdir(parents=True)
    (server.data / "PG_VERSION").write_text("9\n")
    assert "The programs of PostgreSQL 9 must be there for the database in" in str(refusal(server))


def test_damaged_data(server: PostgresServer) -> None:
    programs = first_start(server)
    (server.data / "global" / "pg_control").unlink()
    error = refusal(server)
    assert isinstance(error, RunError)
    assert "could not find the database system" in str(error) or "pg_control" in str(error), programs


def first_start(server: PostgresServer) -> Programs | None:
    running = server.start()
    assert server.stop()
    running.process.wait(60)  # type: ignore[union-attr]
    return running.programs


def test_disk_full(folder: Path) -> None:
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,mode=711", "none", disk], check=False)
    if mounted.returncode:
        pytest.skip("a disk that is full needs the right to mount one")
    try:
        error = refusal(PostgresServer(disk / "postgres"))
        assert isinstance(error, RunError)
        assert "the disk is full. Make room" in str(error)
        assert not (disk / "postgres" / "data").exists()
    finally:
        subprocess.run(["umount", disk], check=True)


# Hosts, ports, programs


def test_a_taken_port(server: PostgresServer) -> None:
    first_start(server)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refusal(server, port=port)
        assert isinstance(error, InputError)
        assert "the port is taken. Name another with --port" in str(error)
    running = server.start(port=port)
    assert sa.make_url(running.url).port == port
    assert server.stop()
    running.process.wait(60)  # type: ignore[union-attr]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "not a host", ""])
def test_a_host_that_is_none(server: PostgresServer, host: str) -> None:
    assert "--host must be an address or a name of this machine" in str(refusal(server, host))


def test_an_address_of_another_machine(server: PostgresServer) -> None:
    error = refusal(server, "192.0.2.1", tls=False)  # of the range for examples
    assert isinstance(error, InputError)
    assert "--host must be an address of this machine" in str(error)


def test_no_programs(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_server, "find_programs", lambda _: [])
    error = refusal(server)
    assert isinstance(error, InputError)
    assert "PostgreSQL must be there to start a database, but this machine has none. Install it" in str(error)


def test_programs_without_tls(server: PostgresServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "postgres").write_bytes(b"")
    plain = Programs(folder, "18.4")
    monkeypatch.setattr(postgres_server, "find_programs", lambda _: [plain])
    server = PostgresServer(folder / "server")
    assert "PostgreSQL must be built with TLS to listen on more than loopback" in str(
        refusal(server, tls=True)
    )


def test_no_openssl(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(one.has_tls for one in find_programs(server_user(server.data))):
        pytest.skip("no PostgreSQL with TLS is installed")
    monkeypatch.setattr(hosts, "environment", lambda: {"PATH": "/nowhere"})
    assert "the program `openssl` makes, but it is not there" in str(refusal(server, tls=True))


def test_programs_that_cannot_be_run_are_not_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("initdb", "postgres"):
        (folder / name).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 99.1'\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    assert str(find_programs()[0].version) == "99.1"
    if os.geteuid() == 0:
        assert find_programs({"user": 65534, "group": 65534})[0].version != "99.1"
    (folder / "postgres").write_text("#!/bin/sh\nexit 3\n")
    assert postgres_programs.find_programs()[0].version != "99.1"


# A folder that hosts share


def test_a_server_on_another_host(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_server, "OTHER_SECONDS", 0.2)
    first_start(server)
    with (server.folder / "lock").open("w") as lock:
        lock.write("node17")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"runs on node17\. Stop it there, or cancel its job"):
            server.stop()
        error = refusal(server)
        assert isinstance(error, RunError)
        assert "A process of node17 has the database" in str(error)
        assert "does not answer" in str(error)
    first_start(server)  # the host went down, and the file system let the lock go


def test_a_file_system_that_does_not_share_locks(server: PostgresServer) -> None:
    running = server.start()
    lock = server.folder / "lock"
    lock.rename(server.folder / "held")
    lock.write_text("node17")
    error = refusal(server)
    assert isinstance(error, InputError)
    assert "runs on node17, but the lock that it holds is not seen on" in str(error)
    lock.write_text(running.host)
    assert f"Process {running.process.pid} serves" in str(refusal(server))  # type: ignore[union-attr]
    (server.folder / "held").rename(lock)
    assert server.stop()
    running.process.wait(60)  # type: ignore[union-attr]
