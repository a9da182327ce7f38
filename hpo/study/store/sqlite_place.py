"""Where a SQLite database may be used: on a file system of one host, by the processes of that host.

SQLite's locks, and the memory that the users of its write-ahead log share, do not reach over a network
(https://www.sqlite.org/wal.html, https://www.sqlite.org/useovernet.html): two hosts that write to one file
damage it sooner or later, and on some network file systems so do two processes of one host.
"""

from __future__ import annotations

import re
from pathlib import Path

import sqlalchemy as sa

from hpo.errors import StorageError
from hpo.study.claims.process import this_machine
from hpo.study.store.schema import workers

# A file system in user space that is not known may be anything: most are of a network.
_NETWORK = re.compile(
    "acfs|afs|beegfs|ceph|cifs|coda|fhgfs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|pvfs2|"
    r"smb3|smbfs|wekafs|fuse(\.(?!bindfs$|encfs$|fuse-overlayfs$|gocryptfs$|mergerfs$|ntfs$|ntfs-3g$).*)?"
)
_ADVICE = (
    "For one host, name a file on its own disk, such as --storage sqlite:////var/tmp/hpo.db. For several, "
    "use PostgreSQL: `hpo database start` runs one, and `hpo copy STUDY --to URL` takes a study there."
)


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that `path` lies on; None: it is the host's own.

    Args:
        mounts: the content of `/proc/self/mountinfo`, see proc_pid_mountinfo(5).
    """
    where = path.resolve()
    mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    longest, kind = -1, ""
    for line in mounts.splitlines():
        mount, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
        # What is mounted later on the same point hides what was there.
        if len(point) >= longest and where.is_relative_to(point):
            longest, kind = len(point), rest.split()[0]
    return kind if _NETWORK.fullmatch(kind) else None


def check_place(path: Path) -> None:
    """Raise StorageError where a SQLite file lies on a network file system."""
    if kind := network_file_system(path):
        raise StorageError(
            f"A SQLite database must lie on a disk of its host, but {path.absolute()} is on a network file "
            f"system ({kind}), where SQLite's locks do not work. {_ADVICE}"
        )


def refuse_other_hosts(connection: sa.Connection, now: sa.ColumnElement[float], lease_seconds: float) -> None:
    """Raise StorageError for a worker that joins a SQLite database which another host uses.

    Containers of one host are no other hosts: they have one kernel, which keeps the locks.
    """
    if connection.dialect.name != "sqlite":
        return
    heard = (workers.c.state == "live", now - workers.c.last_seen < lease_seconds)
    rows = connection.execute(sa.select(workers.c.host, workers.c.machine).where(*heard))
    here = _boot(this_machine())
    if hosts := sorted({row.host for row in rows if _boot(row.machine) not in (None, here)}):
        raise StorageError(
            f"A SQLite database must be used by one host at a time, but workers on {', '.join(hosts)} have "
            f"this one open. {_ADVICE}"
        )


def _boot(machine: str) -> str | None:
    """Which boot of which host a `process.this_machine` is of."""
    parts = machine.rsplit("/", 2)
    return parts[1] if len(parts) == 3 else None
