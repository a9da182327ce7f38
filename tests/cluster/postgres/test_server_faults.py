from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.command_line import Finished, finish, start_hpo, wait_until
from support.worker_process import study

from hpo.cluster.postgres import postgres_server
from hpo.cluster.postgres.postgres_server import PostgresServer
from hpo.errors import HpoError, InputError, RunError
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

pytestmark = pytest.mark.postgres


def refusal(server: PostgresServer, *args: Any, **options: Any) -> HpoError:
    with pytest.raises(HpoError) as raised:
        server.start(*args, **options)
    assert len(str(raised.value)) < 700
    assert "\n" not in str(raised.value)
    return raised.value


# The command in a job


def test_a_job_serves_until_its_signal(server: PostgresServer) -> None:
    """Slurm's SIGTERM is in `test_the_commands_of_the_readme`."""
    job = start_hpo(server.folder.parent, "database", "start", "--foreground", "--folder", "postgres")
    wait_until(server.url_file.exists, job)
    url = server.url_file.read_text().strip()
    with open_storage(url) as storage:  # a client that stays does not keep it
        create_or_resume_study(storage, study(2))
        job.send_signal(signal.SIGUSR1)
        ended = finish(job)
    assert ended.exit_code == 0, ended.err
    assert str(sa.make_url(url).password) not in ended.out + ended.err
    assert f"export HPO_STORAGE=@{server.url_file}" in ended.out
    assert server.running() is None
    assert "database system is shut down" in server.log.read_text().splitlines()[-1]
    assert not (server.data / "postmaster.pid").exists()


def test_a_job_ends_when_its_server_does(server: PostgresServer) -> None:
    job = start_hpo(server.folder.parent, "database", "start", "--foreground", "--folder", "postgres")
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


# Folders


def test_a_folder_with_something_else(new_server: PostgresServer) -> None:
    new_server.folder.mkdir()
    (new_server.folder / "thesis.tex").write_text("years")
    error = refusal(new_server)
    assert isinstance(error, InputError)
    assert "must be empty or made by `hpo database start`, but it holds thesis.tex" in str(error)
    assert (new_server.folder / "thesis.tex").read_text() == "years"


@pytest.mark.skipif(os.geteuid() != 0, reason="the server of another user than root may enter")
def test_a_folder_that_the_servers_user_cannot_enter(folder: Path) -> None:
    folder.chmod(0o700)
    assert "Permission denied" in str(refusal(PostgresServer(folder / "postgres")))
    assert not (folder / "postgres" / "data").exists()


def test_data_of_another_major_version(new_server: PostgresServer) -> None:
    new_server.data.mkdir(parents=True)
    (new_server.data / "PG_VERSION").write_text("9\n")
    assert "The programs of PostgreSQL 9 must be there, but this machine has 1" in str(refusal(new_server))


def test_disk_full(folder: Path) -> None:
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,mode=711", "none", disk], check=False)
    if mounted.returncode:
        pytest.skip("a disk that is full needs the right to mount one")
    try:
        error = refusal(PostgresServer(disk / "postgres"))
        assert isinstance(error, RunError)
        assert re.search(r"cannot be made \((19|20) MiB were free\)", str(error))
        assert not (disk / "postgres" / "data").exists()
    finally:
        subprocess.run(["umount", disk], check=True)


# Hosts, ports, programs


def test_a_taken_port(server: PostgresServer) -> None:
    first = server.start()
    server.stop()
    port = int(sa.make_url(first.url).port or 0)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert "Address already in use" in str(refusal(server, port=port))
        assert sa.make_url(server.start().url).port != port, "unless it was asked for"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "not a host", "192.0.2.1"])
def test_a_host_that_is_none(server: PostgresServer, host: str) -> None:
    assert "--host must be an address or a name of this machine" in str(refusal(server, host))


def test_no_openssl(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "TLS needs the program `openssl`, but it is not there" in str(refusal(server, "0.0.0.0"))


# A folder that hosts share


def test_a_server_on_another_host(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_server, "OTHER_SECONDS", 0.2)
    server.start()
    server.stop()
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
    assert server.start().is_new, "the host went down, and the file system released the lock"


def test_a_file_system_that_does_not_share_locks(server: PostgresServer) -> None:
    running = server.start()
    lock = server.folder / "lock"
    lock.rename(server.folder / "held")
    lock.write_text("node17")
    error = refusal(server)
    assert isinstance(error, InputError)
    assert "runs on node17, but the lock that it holds is not seen on" in str(error)
    lock.write_text(running.host)
    assert 'lock file "postmaster.pid" already exists' in str(refusal(server)), "PostgreSQL's guard"
    (server.folder / "held").rename(lock)
