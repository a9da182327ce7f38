import fcntl
import signal
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from support.command_line import finish, start_hpo, wait_until

from hpo.cluster.postgres import postgres_server
from hpo.cluster.postgres.postgres_server import PostgresServer
from hpo.errors import HpoError, InputError, RunError

pytestmark = pytest.mark.postgres


def refusal(server: PostgresServer) -> str:
    with pytest.raises(HpoError) as raised:
        server.start()
    assert len(str(raised.value)) < 700
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_foreground_server_stops_at_signal(server: PostgresServer) -> None:
    job = start_hpo(server.folder.parent, "database", "start", "--foreground", "--folder", "postgres")
    wait_until(server.url_file.exists, job)
    url = server.url_file.read_text().strip()
    with psycopg.connect(url):  # an open client does not delay the end
        job.send_signal(signal.SIGUSR1)
        ended = finish(job)
    assert ended.exit_code == 0, ended.err
    assert str(sa.make_url(url).password) not in ended.out + ended.err
    assert f"export HPO_STORAGE=@{server.url_file}" in ended.out
    assert server.running() is None
    assert "database system is shut down" in server.log.read_text().splitlines()[-1]
    assert not (server.data / "postmaster.pid").exists()


def test_simultaneous_starts_make_one_server(folder: Path) -> None:
    both = [start_hpo(folder, "database", "start", "--folder", "postgres") for _ in range(2)]
    ended = [finish(process) for process in both]
    server = PostgresServer(folder / "postgres")
    try:
        assert [one.exit_code for one in ended] == [0, 0], ended
        assert sorted("runs already" in one.out for one in ended) == [False, True]
        lines = server.log.read_text().splitlines()
        assert sum("ready to accept connections" in line for line in lines) == 1
    finally:
        assert server.stop()


def test_folder_with_other_files_is_refused(new_server: PostgresServer) -> None:
    new_server.folder.mkdir()
    (new_server.folder / "thesis.tex").write_text("years")
    assert "must be empty or made by `hpo database start`, but it has thesis.tex" in refusal(new_server)
    assert (new_server.folder / "thesis.tex").read_text() == "years"


def test_server_on_another_host(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_server, "OTHER_SECONDS", 0.2)
    server.start()
    server.stop()
    with (server.folder / "lock").open("w") as lock:
        lock.write("node17")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"runs on node17\. Stop it there, or cancel its job"):
            server.stop()
        with pytest.raises(RunError, match="runs on node17, but does not answer"):
            server.start()
    assert server.start().is_new, "the host went down, and the file system released the lock"
