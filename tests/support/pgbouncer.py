"""A real PgBouncer on 127.0.0.1 for the tests, in front of one database of a PostgreSQL server."""

from __future__ import annotations

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

from hpo.cluster.postgres.postgres_server import free_port
from support.postgres import PASSWORD, USER, PostgresServer

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def transaction_pool(server: PostgresServer, database: str, size: int) -> Iterator[str]:
    """Pool `size` connections to a database, each for the length of a transaction; yield the pool's URL."""
    assert PROGRAM is not None
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
    process = subprocess.Popen([PROGRAM, str(settings)], stdout=log, stderr=log, **user)  # type: ignore[call-overload]
    try:
        _wait_until_it_listens(process, port, folder / "log")
        yield server.url(database).replace(f":{server.port}/", f":{port}/")
    finally:
        process.kill()
        process.wait()
        log.close()
        shutil.rmtree(folder)


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    while True:
        assert process.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return


def server_settings(connection: psycopg.Connection) -> dict[str, str]:
    """The settings of the server connection that the pool gives to this transaction."""
    return dict(connection.execute("SELECT name, setting FROM pg_settings").fetchall())
