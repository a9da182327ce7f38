"""A private PostgreSQL server, for studies that outgrow SQLite where nobody runs a database.

Its folder contains:

    data/        files and log of PostgreSQL, owned by the user of the server
    url          URL with the password, readable by its owner alone (`--storage @FOLDER/url`)
    server.crt   certificate for `sslrootcert` in the URL, if other machines may connect
    lock         lock of the server's processes; its text is their host

The role of the workers is no superuser, the superuser cannot connect, and a server on more than loopback
refuses connections without TLS. Two servers on one data folder would destroy it, and PostgreSQL's guard does
not reach the other hosts of a shared file system. So the server inherits a lock on a file, which the kernel
releases when the last process of the server ends.
"""

import fcntl
import ipaddress
import os
import pwd
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psycopg
import sqlalchemy as sa

from hpo.errors import InputError, RunError, shorten
from hpo.redaction import redact
from hpo.study.store.database import URL_FROM_FILE, storage_url

_INSTALLED_IN = ("lib/postgresql/*/bin", "pgsql-*/bin")  # folders under /usr on Debian and on Red Hat

ROLE = DATABASE = "hpo"
START_SECONDS = 600  # time limit of a start; after a crash the server first replays its log
OTHER_SECONDS = 60.0  # time limit for the answer of a server that another process has started
STOP_SECONDS = 120
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
"""End of the `postgresql.conf` of a new database."""


@dataclass(frozen=True)
class Programs:
    """A folder of PostgreSQL's programs, all of one version."""

    folder: Path
    version: tuple[int, ...]
    user: Mapping[str, Any]  # options of `subprocess` for the server's user

    def run(self, program: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program as the server's user and wait for its end."""
        return _run([self.folder / program, *arguments], **self.user, **options)


def server_user(data: Path) -> dict[str, Any]:
    """Return the options of `subprocess` for the user of the server: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    if data.exists() and (owner := data.stat()).st_uid:
        return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise InputError(
        "PostgreSQL refuses to run as root, and this machine has neither a user `postgres` nor `nobody`. "
        "Start the database as another user."
    )


def find_programs(user: Mapping[str, Any], major: int | None = None) -> Programs:
    """Return the newest programs that `user` can run, of the `major` version if given. Raises InputError."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += [folder for pattern in _INSTALLED_IN for folder in Path("/usr").glob(pattern)]
    versions = {folder: version for folder in folders if (version := _version(folder, user))}
    usable = {folder: version for folder, version in versions.items() if major in (None, version[0])}
    if usable:
        newest = max(usable, key=lambda folder: usable[folder])
        return Programs((newest / "postgres").resolve().parent, usable[newest], user)
    installed = ", ".join(f"{version[0]} in {folder}" for folder, version in versions.items()) or "none"
    raise InputError(
        f"PostgreSQL {major or ''} must be installed, but this machine has {installed}. Install it (Debian: "
        "`apt-get install postgresql`; without root: conda's package `postgresql`, or a module of the "
        "cluster), with the folder of `initdb` and `postgres` on the PATH."
    )


def _version(folder: Path, user: Mapping[str, Any]) -> tuple[int, ...]:
    if not all(os.access(folder / name, os.F_OK) for name in ("initdb", "pg_ctl", "postgres")):
        return ()
    try:
        output = _run([folder / "postgres", "--version"], **user).stdout
    except OSError:
        return ()
    version = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)*)", output)
    return tuple(map(int, version[1].split("."))) if version else ()


def _run(command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program with English messages and without libpq's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "HPO_"))}
    options = {"env": {**kept, "LC_ALL": "C"}, "cwd": "/", **options}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)


@dataclass(frozen=True)
class Running:
    url: str  # URL with the password; empty: not written yet
    host: str
    is_new: bool = False

    def as_json(self, folder: Path) -> dict[str, Any]:
        file = str((folder / "url").absolute())
        return {"running": True, "url": redact(self.url), "host": self.host, "url_file": file}

    def text(self, folder: Path, runs: str = "runs") -> str:
        facts = self.as_json(folder)
        return (
            f"The database in {folder} {runs} on {self.host}.\n"
            f"{facts['url']}, with the password in {facts['url_file']}. To use it:\n"
            f"  export HPO_STORAGE=@{facts['url_file']}"
        )


@dataclass(frozen=True)
class PostgresServer:
    """The server of one folder. The folder need not exist."""

    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.data / "server.log"

    @property
    def url_file(self) -> Path:
        return self.folder / "url"

    def start(self, host: str = "127.0.0.1", port: int = 0) -> Running:
        """Start the server and wait for its answer; create the database if there is none.

        `host` is an address or name of this machine, or `0.0.0.0`. TLS is required unless it is a loopback
        address. Port 0 is the previous port, or a free one. Raises InputError or RunError.
        """
        deadline = time.monotonic() + OTHER_SECONDS
        while True:
            with self._locked() as lock:
                if lock is not None:
                    return self._start(lock, host, port)
            running = self.running()
            if running is not None and running.url and not connection_problem(running.url):
                return running
            if time.monotonic() > deadline:
                raise RunError(
                    f"The database in {self.folder} runs on {running.host if running else 'another host'}, "
                    f"but does not answer. `hpo database stop` stops it; see {self.log}."
                )
            time.sleep(0.1)

    def running(self) -> Running | None:
        """Return the live server, also on another host; None if there is none."""
        if not self.folder.is_dir():
            return None
        with self._locked() as lock:
            if lock is not None:
                return None
        url = storage_url(f"{URL_FROM_FILE}{self.url_file}") if self.url_file.exists() else ""
        return Running(url, (self.folder / "lock").read_text().strip())

    def stop(self, mode: str = "fast") -> bool:
        """Stop the server without waiting for its clients; return False if none runs. `mode`: see
        `pg_ctl`.
        """
        running = self.running()
        if running is None:
            return False
        if running.host != socket.gethostname():
            raise InputError(
                f"The database in {self.folder} runs on {running.host}. Stop it there, or cancel its job."
            )
        self._pg_ctl(self._programs(), "stop", "-m", mode, "-t", STOP_SECONDS)
        while self.running() is not None:  # the last process ends later than pg_ctl
            time.sleep(0.02)
        return True

    def single_user(self, programs: Programs, *statements: str, data: Path | None = None) -> None:
        """Run SQL as the superuser, without a server. No server may use the data meanwhile."""
        text = "".join(f"{statement};\n" for statement in statements)
        done = programs.run("postgres", "--single", "-D", data or self.data, "postgres", input=text)
        if done.returncode or re.search("ERROR|FATAL|PANIC", done.stderr):
            raise RunError(f"The database in {self.folder} cannot be prepared: {_errors(done.stderr)}")

    def prepare(self) -> Programs:
        """Create the database if there is none, and return its programs. Raises InputError."""
        files = {path.name for path in self.folder.iterdir()} - {"lock", "data.new"}
        if files and not self.data.exists():
            raise InputError(
                f"{self.folder} must be empty or made by `hpo database start`, but it has "
                f"{', '.join(sorted(files)[:3])} and no database. Name another with --folder."
            )
        programs = self._programs()
        if not files:
            self._make_database(programs)
        return programs

    def _programs(self) -> Programs:
        version = self.data / "PG_VERSION"
        major = int(version.read_text().split(".")[0]) if version.exists() else None
        return find_programs(server_user(self.data), major)

    @contextmanager
    def _locked(self) -> Iterator[IO[str] | None]:
        """Lock the folder; yield None if a server, or its start, has the lock."""
        try:
            # With root, another user runs the server and must be able to enter.
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o711 if os.geteuid() == 0 else 0o700)
            lock = (self.folder / "lock").open("a+")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except BlockingIOError:
                is_free = False
        except OSError as error:
            raise InputError(
                f"{self.folder} must be a folder that may be written, on a file system with locks, but: "
                f"{error.strerror}. Name another with --folder."
            ) from None
        with lock:
            yield lock if is_free else None

    def _start(self, lock: IO[str], host: str, port: int) -> Running:
        here, tls = socket.gethostname(), not _is_loopback(host)
        lock.seek(0)
        before = lock.read().strip()
        last = sa.make_url(self.url_file.read_text().strip()) if self.url_file.exists() else None
        if last and before not in ("", here) and not connection_problem(_text(last)):
            raise InputError(
                f"The database in {self.folder} runs on {before}, but its lock does not show on {here}: "
                f"the file system does not share locks. Start it on {before} alone."
            )
        lock.truncate(0)
        lock.write(here)
        lock.flush()
        try:
            programs = self.prepare()
            port = port or free_port(host, last.port or 0 if last else 0)
            name, query = here if host == "0.0.0.0" else host, {}
            if tls:
                names = [name, here, socket.getfqdn(), "localhost", "127.0.0.1"]
                shutil.copyfile(certificate(self.data, names, programs.user), self.folder / "server.crt")
                query = {"sslmode": "verify-full", "sslrootcert": str(self.folder / "server.crt")}
            kind, where = ("hostssl", "all") if tls else ("host", "samehost")
            (self.data / "pg_hba.conf").write_text(f"{kind} all all {where} scram-sha-256\n")
            password = last.password if last else secrets.token_urlsafe(24)
            if last is None:
                self.single_user(programs, f"ALTER ROLE {ROLE} PASSWORD '{password}'")
            url = _text(sa.URL.create("postgresql", ROLE, password, name, port, DATABASE, query))
        except OSError as error:
            raise RunError(f"The database in {self.folder} cannot be started: {error}") from error
        settings = {"listen_addresses": host, "port": port, "ssl": "on" if tls else "off"}
        settings |= {"unix_socket_directories": "", **self.settings}
        options = shlex.join(f"--{name}={value}" for name, value in settings.items())
        more = ("-l", self.log, "-t", START_SECONDS, "-o", options)
        self._pg_ctl(programs, "start", *more, pass_fds=(lock.fileno(),))
        if problem := connection_problem(url):
            self._pg_ctl(programs, "stop", "-m", "fast")
            raise RunError(f"The database in {self.folder} has started, but cannot be reached: {problem}")
        write_secret(self.url_file, url)
        return Running(url, here, is_new=True)

    def _pg_ctl(self, programs: Programs, command: str, *options: object, **of_process: Any) -> None:
        begin = self.log.stat().st_size if self.log.exists() else 0
        done = programs.run("pg_ctl", command, "-w", "-D", self.data, *options, **of_process)
        if done.returncode:
            log = self.log.read_bytes()[begin:].decode(errors="replace") if self.log.exists() else ""
            raise RunError(
                f"`pg_ctl {command}` fails for the database in {self.folder}: {_errors(done.stderr + log)}"
            )

    def _make_database(self, programs: Programs) -> None:
        new = self.folder / "data.new"  # replaces that of a killed attempt
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        if programs.user:
            os.chown(new, programs.user["user"], programs.user["group"])
        options = ("-U", "postgres", "-A", "reject", "-E", "UTF8", "--locale=C", "--data-checksums")
        done = programs.run("initdb", "-D", new, *options)
        if done.returncode:
            shutil.rmtree(new)
            raise RunError(f"The database in {self.folder} cannot be made: {_errors(done.stderr)}")
        with (new / "postgresql.conf").open("a") as settings:
            settings.write(_SETTINGS)
        statements = (f"CREATE ROLE {ROLE} LOGIN", f"CREATE DATABASE {DATABASE} OWNER {ROLE}")
        self.single_user(programs, *statements, data=new)
        new.rename(self.data)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str, wanted: int = 0) -> int:
    """Return the port `wanted` of `host` if it is free, or else a free port."""
    for port in (wanted, 0):
        with suppress(OSError), socket.create_server((host, port)) as probe:
            return int(probe.getsockname()[1])
    raise InputError(f"--host must be an address or a name of this machine, but got `{host}`.")


def certificate(folder: Path, names: list[str], user: Mapping[str, Any]) -> Path:
    """Create a self-signed `server.crt` in `folder`, with a `server.key` owned by `user`."""
    kinds = {name: "IP" if re.fullmatch(r"[\d.]+", name) else "DNS" for name in names}
    subject = "subjectAltName=" + ",".join(f"{kind}:{name}" for name, kind in kinds.items())
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650")
    made = folder / "server.crt"
    files = ("-keyout", folder / "server.key", "-out", made, "-subj", "/CN=hpo", "-addext", subject)
    try:
        done = subprocess.run(
            ["openssl", "req", "-x509", *kind, *files], cwd="/", capture_output=True, text=True, **user
        )
    except FileNotFoundError:
        raise InputError(
            "TLS needs the program `openssl`, which is not installed. Install it, or listen on 127.0.0.1."
        ) from None
    if done.returncode:
        raise RunError(f"openssl cannot make a certificate for {names[0]}: {shorten(done.stderr, 300)}")
    return made


def _errors(output: str) -> str:
    lines = output.splitlines()
    errors = [line for line in lines if re.search("FATAL|PANIC|ERROR|error:|could not", line)]
    return shorten(" ".join(errors[-3:] or lines[-3:]), 500)


def _text(url: sa.URL) -> str:
    return url.render_as_string(hide_password=False)


def connection_problem(url: str) -> str:
    """Return the reason if the server at `url` does not answer, or else an empty text."""
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError as error:
        return str(error)
    return ""


def write_secret(file: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")  # 0600
    with os.fdopen(handle, "w") as opened:
        opened.write(f"{text}\n")
    Path(name).replace(file)
