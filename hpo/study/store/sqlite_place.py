"""Where a SQLite database may be used: on a file system of one host, by the processes of that host.

SQLite's locks, and the memory that the users of its write-ahead log share, do not reach over a network
(https://www.sqlite.org/wal.html, https://www.sqlite.org/useovernet.html): two hosts that write to one file
damage it sooner or later, and on some network file systems so do two processes of one host.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.errors import StorageError
from hpo.study.claims.process import this_machine
from hpo.study.store.schema import workers

if TYPE_CHECKING:
    from hpo.study.store.storage import Storage

# A file system in user space that is not known may be anything: most are of a network.
_NETWORK = re.compile(
    "9p|acfs|afs|beegfs|ceph|cifs|coda|fhgfs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|pvfs2|"
    r"smb3|smbfs|virtiofs|wekafs|fuse(\.(?!bindfs$|encfs$|fuse-overlayfs$|gocryptfs$|mergerfs$|ntfs$|ntfs-3g$).*)?"
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


def refuse_other_hosts(storage: Storage) -> None:
    """Raise StorageError for a worker that joins a SQLite database which another host uses.

    It takes a lease if workers of another host did not sign off and may be gone. Containers of one host are
    no other hosts: they have one kernel, which keeps the locks. Nor is this host before its last boot.
    """
    if storage.engine.dialect.name != "sqlite":
        return
    boot = this_machine().rsplit("/", 2)[1]
    elsewhere = (workers.c.machine.not_like(f"%/{boot}/%"), workers.c.host != socket.gethostname())
    if rows := storage.watch_workers(*elsewhere):
        hosts = ", ".join(sorted({row.host for row in rows}))
        raise StorageError(
            f"A SQLite database must be used by one host at a time, but workers on {hosts} have this one "
            f"open. {_ADVICE}"
        )
