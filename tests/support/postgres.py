"""A real PostgreSQL server on 127.0.0.1, as of `hpo database start` but without fsync, and a PgBouncer."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from hpo.cluster.postgres.postgres_server import PostgresServer as PrivateServer
from hpo.cluster.postgres.postgres_server import free_port
from support.waiting import wait_for

USER = "optuna"
PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
PASSWORD = "p%{w} @d"  # every character that breaks a URL, a format string or a config parser


class PostgresServer:
    """One server; `stop` breaks all its connections, `start` brings it back on the same port.

    Args:
        tls: connections without TLS are refused.
    """

    def __init__(self, *, tls: bool = False) -> None:
        self._tls = tls
        self.folder = Path(tempfile.mkdtemp(prefix="hpo-postgres-"))
        self.folder.chmod(0o711)  # root's server is another user
        fast = {"fsync": "off", "full_page_writes": "off"}  # what is committed outlives its processes
        self._server = PrivateServer(self.folder, fast)
        self.port = free_port("127.0.0.1")
        self.certificate = self.folder / "server.crt"
        self._server.single_user(
            self._server.prepare(), f"CREATE ROLE {USER} SUPERUSER LOGIN PASSWORD '{PASSWORD}'"
        )

    def start(self) -> None:
        self._server.start("0.0.0.0" if self._tls else "127.0.0.1", self.port)

    def stop(self, *, immediate: bool = False) -> None:
        """Stop without waiting for clients; `immediate`: as if it had crashed."""
        self._server.stop("immediate" if immediate else "fast")

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def connect(self, database: str) -> psycopg.Connection:
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user=USER, password=PASSWORD, dbname=database, autocommit=True
        )

    @contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """Make a database that is empty, or a copy of another; yield its URL, drop it."""
        name = f"t{time.monotonic_ns()}"
        with self.connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield self.url(name)
        finally:
            with self.connect("postgres") as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def url(self, database: str, user: str = USER, password: str = PASSWORD) -> str:
        quoted = "".join(c if c.isalnum() else f"%{ord(c):02X}" for c in password)
        return f"postgresql://{user}:{quoted}@127.0.0.1:{self.port}/{database}"


@contextmanager
def stopped(server: PostgresServer) -> Iterator[None]:
    """Crash the server, and start it again at the end of the block."""
    server.stop(immediate=True)
    try:
        yield
    finally:
        server.start()


@contextmanager
def transaction_pool(server: PostgresServer, database: str, size: int) -> Iterator[str]:
    """Pool `size` connections to a database, each for the length of a transaction; yield the pool's URL."""
    assert PGBOUNCER is not None
    folder, port = Path(tempfile.mkdtemp(prefix="hpo-pgbouncer-")), free_port("127.0.0.1")
    users, settings = folder / "users.txt", folder / "pgbouncer.ini"
    users.write_text(f'"{USER}" "{PASSWORD}"\n')
    settings.write_text(
        "[databases]\n"
        f"{database} = host=127.0.0.1 port={server.port} dbname={database}\n"
        "[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = scram-sha-256\nauth_file = {users}\n"
        f"pool_mode = transaction\ndefault_pool_size = {size}\nmax_client_conn = 200\n"
        # A client that waits longer for a connection is cut off: a test that hangs fails.
        "query_wait_timeout = 15\n"
    )
    user: dict[str, str] = {}
    if os.geteuid() == 0:  # it refuses to run as root
        user = {"user": "postgres", "group": "postgres"}
        for path in (folder, users, settings):
            shutil.chown(path, *user.values())
    log = (folder / "log").open("wb")
    process = subprocess.Popen([PGBOUNCER, str(settings)], stdout=log, stderr=log, **user)
    try:
        wait_for(lambda: _listens(port), check=lambda: _check(process, folder / "log"))
        yield server.url(database).replace(f":{server.port}/", f":{port}/")
    finally:
        process.kill()
        process.wait()
        log.close()
        shutil.rmtree(folder)


def _check(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.poll() is None, log.read_text()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
