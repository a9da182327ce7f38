"""A real PostgreSQL server on 127.0.0.1 for the tests: what `hpo database start` runs, without fsync."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from hpo.cluster.postgres.postgres_server import PostgresServer as PrivateServer
from hpo.cluster.postgres.postgres_server import free_port

USER = "optuna"
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
