"""A real PostgreSQL server on a free port of 127.0.0.1, with password authentication, for the tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

USER = "optuna"
PASSWORD = "p%{w} @d"  # every character that breaks a URL, a format string or a config parser


def find_programs() -> Path | None:
    """Return the folder with `initdb` and `postgres`, which Debian keeps off the PATH."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if all((folder / name).exists() for name in ("initdb", "postgres")):
            return folder
    return None


class PostgresServer:
    """One server; `stop` breaks all its connections, `start` brings it back on the same port."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="hpo-postgres-"))
        self._data = self.folder / "data"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        # PostgreSQL refuses to run as root.
        self._as_user: dict[str, object] = {}
        if os.geteuid() == 0:
            self._as_user = {"user": "postgres", "group": "postgres", "extra_groups": []}
            shutil.chown(self.folder, "postgres", "postgres")
        password_file = self.folder / "password"
        password_file.write_text(PASSWORD)
        password_file.chmod(0o644)
        initdb = [programs / "initdb", "-D", self._data, "-U", USER, f"--pwfile={password_file}"]
        initdb += ["-A", "scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "-N"]
        done = subprocess.run(initdb, cwd=self.folder, capture_output=True, text=True, **self._as_user)
        assert done.returncode == 0, done.stderr
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(
                f"listen_addresses='127.0.0.1'\nport={self.port}\nunix_socket_directories=''\n"
                "fsync=off\nsynchronous_commit=off\nfull_page_writes=off\nmax_connections=200\n"
            )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._as_user,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                with self.connect("postgres"):
                    return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline, (self.folder / "log").read_text()
                time.sleep(0.05)

    def stop(self, *, immediate: bool = False) -> None:
        """Stop without waiting for clients; `immediate`: as if it had crashed."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
            self._process.wait(timeout=60)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def connect(self, database: str) -> psycopg.Connection:
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=USER,
            password=PASSWORD,
            dbname=database,
            autocommit=True,
        )

    @contextmanager
    def database(self) -> Iterator[str]:
        """Make an empty database, yield its URL, drop it."""
        name = f"t{time.monotonic_ns()}"
        with self.connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name}")
        try:
            yield self.url(name)
        finally:
            with self.connect("postgres") as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def url(self, database: str, user: str = USER, password: str = PASSWORD) -> str:
        quoted = "".join(c if c.isalnum() else f"%{ord(c):02X}" for c in password)
        return f"postgresql://{user}:{quoted}@127.0.0.1:{self.port}/{database}"
