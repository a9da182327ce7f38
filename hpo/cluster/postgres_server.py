"""A private PostgreSQL server for a study that outgrows SQLite where nobody runs a database.

One folder holds all of it:

    data/        PostgreSQL's own; of the user that the server runs as
    url          how workers reach it, with the password; for its owner alone (`--storage @FOLDER/url`)
    server.crt   what `sslrootcert` in that URL names, where others than this machine may connect
    lock         held by the server's processes; its text is the host that they run on
    log          what the server says

It is a real database: fsync stays on, so what a worker was told is stored outlives a power cut. Passwords are
stored as SCRAM-SHA-256, the role of the workers is no superuser and cannot run programs on the server's host,
the superuser has no password and cannot connect, and a server that listens on more than loopback refuses
connections without TLS.

Two servers on one data folder would destroy it. PostgreSQL's guard is a file with a process id, which says
nothing to another host of a shared file system, where batch jobs put their databases. So the server inherits
a lock on a file, and the kernel lets that go when the last of its processes ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psycopg
import sqlalchemy as sa

from hpo.cluster.hosts import certificate, free_port, is_loopback, names_of
from hpo.cluster.postgres_programs import Programs, choose, environment, find_programs, server_user
from hpo.errors import HpoError, InputError, RunError, shorten
from hpo.study.database import URL_FROM_FILE, storage_url

ROLE = DATABASE = "hpo"
START_SECONDS = 600.0
"""How long a server may take to be ready: after a crash it first replays its log."""
OTHER_SECONDS = 60.0
"""How long one that another process has started may take to answer."""
STOP_SECONDS = 120.0

_SETTINGS = """
# hpo: a worker has two or three connections and sends small statements.
max_connections = 1000
shared_buffers = 256MB
max_parallel_workers_per_gather = 0
jit = off
# A worker that hangs, or whose host or network is gone, does not hold its locks for ever.
idle_in_transaction_session_timeout = 10min
tcp_keepalives_idle = 60
tcp_keepalives_interval = 10
tcp_keepalives_count = 6
tcp_user_timeout = 60s
"""
"""At the end of `postgresql.conf` of a new database, for its owner to change."""

# What PostgreSQL's programs say -> what must hold and what to do.
_WRONG_INPUT = {
    r"could not bind .*in use|address already in use": (
        "the port is taken. Name another with --port, or end what listens there"
    ),
    r"cannot assign requested address|could not translate host name|name or service not known": (
        "--host must be an address of this machine"
    ),
    r"permission denied": (
        "the server's user must be able to reach the folder and the programs. Name another with --folder"
    ),
}
_CANNOT_GO_ON = {
    r"no space left|disk space|disk quota|wrote only": "the disk is full. Make room, then start it again",
    r"cannot allocate memory|could not map anonymous": "the machine has too little memory",
}


@dataclass(frozen=True)
class Running:
    """A server."""

    url: str
    """With the password; empty where the server is not ready yet and will have another than last time."""
    host: str
    """The machine that it runs on."""
    programs: Programs | None = None
    """That this call has started it with; None where it ran before."""
    process: subprocess.Popen[bytes] | None = None
    """Likewise; of this machine."""


@dataclass(frozen=True)
class PostgresServer:
    """The server of one folder, which need not be there yet."""

    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of PostgreSQL, for the next start."""

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def url_file(self) -> Path:
        return self.folder / "url"

    @property
    def _last_url_file(self) -> Path:
        """That of last time, while a server with another URL starts."""
        return self.folder / "url.last"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    # Start and stop

    def start(self, host: str = "127.0.0.1", port: int = 0, *, tls: bool | None = None) -> Running:
        """Make the database where there is none, start its server, and return when it answers.

        Args:
            host: what it listens on: an address or name of this machine, or `0.0.0.0` for all of them.
            port: 0 takes that of last time, or a free one.
            tls: refuse connections without TLS; None: where others than this machine can connect.

        Raises:
            InputError: the folder, host or port cannot be used, or PostgreSQL's programs are not there.
            RunError: the server does not start.
        """
        tls = not is_loopback(host) if tls is None else tls
        deadline = time.monotonic() + OTHER_SECONDS
        while True:
            with self._locked() as lock:
                if lock is not None:
                    return self._start(lock, host, port, tls=tls)
            running = self.running()
            if running is not None and running.url and not _problem(running.url):
                return running
            if time.monotonic() > deadline:
                raise RunError(
                    f"A process of {running.host if running else 'another host'} has the database in "
                    f"{self.folder}, but it does not answer. `hpo database stop` ends it; see {self.log}."
                )
            time.sleep(0.1)

    def running(self) -> Running | None:
        """Return the server if there is one, also on another host."""
        if not self.folder.is_dir():
            return None
        with self._locked() as lock:
            if lock is not None:
                return None
        url = storage_url(f"{URL_FROM_FILE}{self.url_file}") if self.url_file.exists() else ""
        return Running(url, (self.folder / "lock").read_text().strip())

    def stop(self) -> bool:
        """End the server without waiting for its clients; False: there is none.

        Raises:
            InputError: it runs on another host, or is of another user.
            RunError: it does not end.
        """
        running = self.running()
        if running is None:
            return False
        if running.host != socket.gethostname():
            raise InputError(
                f"The database in {self.folder} runs on {running.host}. Stop it there, or cancel its job."
            )
        deadline = time.monotonic() + STOP_SECONDS
        while self.running() is not None:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has not begun, or has ended
                os.kill(self._server_pid(), signal.SIGINT)
            if time.monotonic() > deadline:
                raise RunError(f"The database did not end within {STOP_SECONDS:.0f} s. See {self.log}.")
            time.sleep(0.1)
        return True

    def serve(self, running: Running, until: Sequence[signal.Signals]) -> None:
        """Wait for one of the signals, then end the server that this process has started.

        They must be blocked (`signal.pthread_sigmask`), so that none is missed.

        Raises:
            RunError: the server has ended by itself.
        """
        process = running.process
        assert process is not None
        while process.poll() is None:
            if signal.sigtimedwait(until, 0.5) is not None:
                process.send_signal(signal.SIGINT)
                process.wait()
                return
        raise RunError(f"The database has ended by itself: {self._last_words(0)}")

    def single_user(self, programs: Programs, *statements: str, data: Path | None = None) -> None:
        """Run SQL as the superuser, without a server. Nothing else may use the data meanwhile."""
        options = ("--single", "-D", data or self.data, "postgres")
        done = programs.run(
            "postgres", *options, as_server=True, input="".join(f"{one};\n" for one in statements)
        )
        if done.returncode or re.search("ERROR|FATAL|PANIC", done.stderr):
            raise self._explained("The database cannot be prepared", done.stderr)

    # The folder

    @contextmanager
    def _locked(self) -> Iterator[IO[str] | None]:
        """The folder's lock; None: a server has it, or who is about to start one."""
        try:
            # Root's server is another user, who must be able to go through.
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o711 if os.geteuid() == 0 else 0o700)
            lock = (self.folder / "lock").open("a+")
        except OSError as error:
            raise InputError(
                f"{self.folder} must be a folder that may be written, but: {error.strerror}. Name another "
                "with --folder."
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            except OSError as error:
                raise InputError(
                    f"{self.folder} must be on a file system with locks, but: {error.strerror}. Without them "
                    "two hosts could destroy the database. Name a local folder with --folder."
                ) from None
            yield lock

    def _start(self, lock: IO[str], host: str, port: int, *, tls: bool) -> Running:
        here = socket.gethostname()
        try:
            self._refuse_other_server(lock, here)
            lock.truncate(0)
            lock.write(here)
            lock.flush()
            programs = self.prepare(tls=tls)
            port = port or self._last_port(host) or free_port(host)
            names = names_of(host)
            if tls:
                shutil.copyfile(certificate(self.data, names, programs.user), self.folder / "server.crt")
            kind, where = ("hostssl", "all") if tls else ("host", "samehost")
            (self.data / "pg_hba.conf").write_text(f"{kind} all all {where} scram-sha-256\n")
            url = sa.URL.create(
                "postgresql",
                ROLE,
                self._password(programs),
                names[0],
                port,
                DATABASE,
                {"sslmode": "verify-full", "sslrootcert": str(self.folder / "server.crt")} if tls else {},
            ).render_as_string(hide_password=False)
            if self.url_file.exists() and self._last_url() != url:
                self.url_file.replace(self._last_url_file)  # nobody takes it for that of this server
            process = self._launch(programs, lock, host, port, url, tls=tls)
            write_secret(self.url_file, url)
            self._last_url_file.unlink(missing_ok=True)
        except OSError as error:
            raise self._explained("The database cannot be started", str(error)) from error
        return Running(url, here, programs, process)

    def _refuse_other_server(self, lock: IO[str], here: str) -> None:
        """Raise InputError where one runs without the lock: on another host, or not made by `start`."""
        lock.seek(0)
        before = lock.read().strip()
        last = self._last_url() if before not in ("", here) else ""
        if last and not _problem(last):
            raise InputError(
                f"The database in {self.folder} runs on {before}, but the lock that it holds is not seen on "
                f"{here}: the file system does not share locks. Start it on {before} alone."
            )
        with suppress(FileNotFoundError):
            pid = self._server_pid()
            with suppress(OSError):
                if Path(f"/proc/{pid}/cwd").samefile(self.data):
                    raise InputError(
                        f"Process {pid} serves {self.data}, but `hpo database start` did not start it. "
                        "End it first."
                    )
            (self.data / "postmaster.pid").unlink()  # of a host that went down, or a process that was killed

    def _server_pid(self) -> int:
        try:
            return int((self.data / "postmaster.pid").read_text().split("\n")[0])
        except PermissionError:
            raise InputError(f"The database in {self.folder} is of another user, who can stop it.") from None

    def prepare(self, *, tls: bool) -> Programs:
        """Make the database where there is none, and return the programs that serve it.

        Raises:
            InputError: the folder holds something else, or there are no such programs.
            RunError: the database cannot be made.
        """
        strange = {path.name for path in self.folder.iterdir()} - {"lock", "log", "data.new"}
        version = self.data / "PG_VERSION"
        if strange and not version.exists():
            raise InputError(
                f"{self.folder} must be empty or made by `hpo database start`, but it holds "
                f"{', '.join(sorted(strange)[:3])} and no database. Name another with --folder."
            )
        found = re.match(r"\d+", version.read_text()) if strange else None
        major = int(found[0]) if found else None
        why = f"for the database in {self.folder}" if found else "to start a database"
        programs = choose(find_programs(server_user(self.data)), major, tls=tls, why=why)
        if not strange:
            self._initialise(programs)
        return programs

    def _initialise(self, programs: Programs) -> None:
        new = self.folder / "data.new"  # an attempt that was killed is begun anew
        with suppress(FileNotFoundError):
            shutil.rmtree(new)
        new.mkdir(mode=0o700)
        if programs.user:
            os.chown(new, programs.user["user"], programs.user["group"])
        options = ("-U", "postgres", "-A", "reject", "-E", "UTF8", "--locale=C", "--data-checksums")
        done = programs.run("initdb", "-D", new, *options, as_server=True)
        if done.returncode:
            shutil.rmtree(new)
            raise self._explained("The database cannot be made", done.stderr)
        with (new / "postgresql.conf").open("a") as settings:
            settings.write(_SETTINGS)
        made = (f"CREATE ROLE {ROLE} LOGIN", f"CREATE DATABASE {DATABASE} OWNER {ROLE}")
        self.single_user(programs, *made, data=new)
        new.rename(self.data)

    def _password(self, programs: Programs) -> str:
        """That of the last URL; a new one where there is none."""
        if last := self._last_url():
            return str(sa.make_url(last).password)
        password = secrets.token_urlsafe(24)
        self.single_user(programs, f"ALTER ROLE {ROLE} PASSWORD '{password}'")
        return password

    def _last_url(self) -> str:
        """The URL of last time, also of a start that came to nothing; empty: there is none."""
        found = [file for file in (self.url_file, self._last_url_file) if file.exists()]
        return found[0].read_text().strip() if found else ""

    def _last_port(self, host: str) -> int | None:
        """That of last time, if it is free: workers that wait for the database find it again."""
        if not (last := self._last_url()):
            return None
        port = sa.make_url(last).port
        try:
            return free_port(host, port or 0)
        except OSError:
            return None

    # The process

    def _launch(
        self, programs: Programs, lock: IO[str], host: str, port: int, url: str, *, tls: bool
    ) -> subprocess.Popen[bytes]:
        """Start the server and wait until it answers."""
        settings = {
            "listen_addresses": host,
            "port": str(port),
            "unix_socket_directories": "",
            "ssl": "on" if tls else "off",
            **self.settings,
        }
        command = [str(programs.folder / "postgres"), "-D", str(self.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with self.log.open("ab") as log:
            begin = log.tell()
            process = subprocess.Popen(
                command,
                env=environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
                **programs.user,
            )
        deadline = time.monotonic() + START_SECONDS
        try:
            while problem := _problem(url):
                if process.poll() is not None:
                    raise self._explained("The database does not start", self._last_words(begin))
                if not re.search("refused|starting up|not yet accepting|recovery", problem):
                    raise self._explained("The database has started, but cannot be reached", problem)
                if time.monotonic() > deadline:
                    raise RunError(f"The database is not ready after {START_SECONDS:.0f} s. See {self.log}.")
                time.sleep(0.05)
        except BaseException:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait()
            raise
        return process

    def _last_words(self, begin: int) -> str:
        """What the server has said of errors in its log, from `begin` on."""
        said = self.log.read_bytes()[begin:].decode(errors="replace").splitlines()
        errors = [line for line in said if re.search(r"(FATAL|PANIC|ERROR|could not .*):", line)]
        return " ".join(errors[-3:] or said[-3:])

    def _explained(self, what: str, said: str) -> HpoError:
        for kind, problems in ((InputError, _WRONG_INPUT), (RunError, _CANNOT_GO_ON)):
            for pattern, advice in problems.items():
                if re.search(pattern, said, re.IGNORECASE):
                    return kind(f"{what} in {self.folder}: {advice}. ({shorten(said, 300)})")
        return RunError(f"{what} in {self.folder}: {shorten(said, 500)}")


def _problem(url: str) -> str:
    """Why the server at `url` does not answer; empty: it does."""
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError as error:
        return str(error)
    return ""


def write_secret(file: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")  # 0600
    with os.fdopen(handle, "w") as opened:
        opened.write(f"{text}\n")
    Path(name).replace(file)
