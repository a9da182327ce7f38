"""URLs of databases, and connections to them.

A URL holds a password, so every message redacts it. SQLite's locks do not reach over a network
(https://www.sqlite.org/wal.html, https://www.sqlite.org/useovernet.html): two hosts that write to one file
damage it sooner or later. On some network file systems, so do two processes of one host.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from hpo.errors import StorageError, printable, shorten
from hpo.redaction import redact
from hpo.study.store.connection import bound_transaction, connection_pool

DEFAULT_URL = "sqlite:///runs/hpo.db"
URL_FROM_FILE = "@"

_DRIVERS = {"sqlite": ("", "pysqlite"), "postgresql": ("", "psycopg", "psycopg2")}
"""Accepted drivers. A URL for another program may name psycopg2; hpo connects with psycopg."""
_MIN_MASKED = 8  # shorter passwords may equal an ordinary word of a message, so they are not masked there
_EXAMPLES = (
    "the URL of a file without options, such as `sqlite:///runs/hpo.db` (four slashes before an absolute "
    "path), or of a server, such as `postgresql://user:password@host:5432/database`"
)
# An unknown file system in user space counts as a network file system: most of them are.
_NETWORK = re.compile(
    "9p|acfs|afs|beegfs|ceph|cifs|coda|fhgfs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|pvfs2|"
    r"smb3|smbfs|virtiofs|wekafs|fuse(\.(?!bindfs$|encfs$|fuse-overlayfs$|gocryptfs$|mergerfs$|ntfs$|ntfs-3g$).*)?"
)
ADVICE = (
    "For one host, name a file on its own disk, such as --storage sqlite:////var/tmp/hpo.db. For several, "
    "use PostgreSQL: `hpo database start` runs one, and `hpo copy STUDY --to URL` copies a study there."
)


def storage_url(given: str | None = None) -> str:
    """Return the URL of the database: `given` (--storage), else HPO_STORAGE, else SQLite under runs/.

    `@FILE` means the URL in a file, which keeps the password out of arguments and variables.
    """
    url = (given or os.environ.get("HPO_STORAGE") or DEFAULT_URL).strip()
    return _url_in(Path(url.removeprefix(URL_FROM_FILE))) if url.startswith(URL_FROM_FILE) else url


def _url_in(file: Path) -> str:
    try:
        mode, owner, text = file.stat().st_mode, file.stat().st_uid, file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"The file `{file}` must hold the URL of the storage, but: {error}.") from None
    # A group may read a file of root: Kubernetes hands out secrets like this.
    if mode & (0o027 if owner == 0 else 0o077):
        raise StorageError(
            f"The file `{file}` holds a password, so only its owner may read it, but its mode is "
            f"{mode & 0o777:04o}. Run `chmod 600 {file}`."
        )
    if not re.fullmatch(r"\w+(\+\w+)?://\S.*", text):  # not shown: it may be the password
        raise StorageError(f"The file `{file}` must hold one line: {_EXAMPLES}.")
    return text


def parse_url(url: str) -> sa.URL:
    """Return `url` with its driver. Raises StorageError unless it names a SQLite file or PostgreSQL."""
    space_in_password = r"(?i)[?&]\w*(pass|secret)\w*=[^&]*\s"
    if url.startswith("postgres") and (url.count("@") > 1 or re.search(space_in_password, url)):
        # Not shown: a part of the password may look like the host.
        raise StorageError("In the storage URL, write `@` in a password as `%40` and a space as `%20`.")
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        raise _unusable(url) from None
    backend, _, driver = parsed.drivername.partition("+")
    backend = "postgresql" if backend == "postgres" else backend
    has_control = re.search(r"[\x00-\x1f\x7f]", unquote(url))
    if has_control or url != url.strip() or driver not in _DRIVERS.get(backend, ()):
        raise _unusable(url)
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    # A second URL would be a part of the file's name, with its password.
    if parsed.host or parsed.query or url.count("://") > 1 or not _is_file_name(parsed.database or ""):
        raise _unusable(url)
    return parsed.set(drivername="sqlite")


def _is_file_name(file: str) -> bool:
    return file not in ("", ":memory:") and not file.endswith("/") and not Path(file).is_dir()


def _unusable(url: str) -> StorageError:
    shown = shorten(redact(printable(url)), 200)
    return StorageError(f"The storage must be {_EXAMPLES}, but got `{shown}`.")


def without_password(url: str, text: str) -> str:
    """Return a message about the database at `url` without its password.

    A word of the message is masked only if it cannot be an ordinary one or a part of the URL.
    """
    parsed = sa.make_url(url)
    password, others = str(parsed.password or ""), parsed.set(password="").render_as_string()
    text = redact(text)
    if len(password) >= _MIN_MASKED and not password.isalpha() and password not in others:
        for form in (password, quote(password, safe=""), quote_plus(password)):
            text = text.replace(form, "***")
    return text


def shown_url(url: str) -> str:
    """Return `url` for messages, with the absolute path of a SQLite file."""
    path = sqlite_path(parse_url(url))
    shown = redact(url)
    return shown if path is None or path.is_absolute() else f"{shown} ({path.absolute()})"


def check_folder(url: str) -> None:
    """Raise StorageError if the folder of a SQLite file is missing or on a network file system."""
    path = sqlite_path(parse_url(url))
    if path is None:
        return
    if not path.parent.is_dir():
        raise StorageError(f"The folder `{path.parent}` of {redact(url)} must exist. Create it first.")
    if kind := network_file_system(path):
        raise StorageError(
            f"A SQLite database must be on a disk of its host, but {path.absolute()} is on a network file "
            f"system ({kind}), where SQLite's locks do not work. {ADVICE}"
        )


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system of `path`, or None. `mounts`: proc_pid_mountinfo(5)."""
    where = path.resolve()
    mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    longest, kind = -1, ""
    for line in mounts.splitlines():
        mount, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
        # A later mount on the same point hides the earlier one.
        if len(point) >= longest and where.is_relative_to(point):
            longest, kind = len(point), rest.split()[0]
    return kind if _NETWORK.fullmatch(kind) else None


def connect(url: str) -> sa.Engine:
    """Return an engine for the database at `url`. A missing SQLite file is created."""
    parsed = parse_url(url)
    engine = sa.create_engine(parsed, pool=connection_pool(parsed))
    if engine.dialect.name == "postgresql":
        sa.event.listen(engine, "begin", bound_transaction)
    return engine


def sqlite_path(url: sa.URL) -> Path | None:
    return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


@contextmanager
def snapshot(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Yield a connection whose queries all see the database as it was at the first query."""
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execution_options(isolation_level="REPEATABLE READ")
        else:
            connection.exec_driver_sql("BEGIN")  # sqlite3 begins a transaction only before a change
        yield connection
