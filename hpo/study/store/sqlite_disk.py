"""The disk of a SQLite database: it must be on the host that uses it.

SQLite's locks and the shared memory of its write-ahead log do not reach over a network
(https://www.sqlite.org/wal.html, https://www.sqlite.org/useovernet.html). Two hosts that write to one file
damage it sooner or later. On some network file systems, so do two processes of one host.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpo.errors import StorageError

# An unknown file system in user space counts as a network file system: most of them are.
_NETWORK = re.compile(
    "9p|acfs|afs|beegfs|ceph|cifs|coda|fhgfs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|pvfs2|"
    r"smb3|smbfs|virtiofs|wekafs|fuse(\.(?!bindfs$|encfs$|fuse-overlayfs$|gocryptfs$|mergerfs$|ntfs$|ntfs-3g$).*)?"
)
ADVICE = (
    "For one host, name a file on its own disk, such as --storage sqlite:////var/tmp/hpo.db. For several, "
    "use PostgreSQL: `hpo database start` runs one, and `hpo copy STUDY --to URL` copies a study there."
)


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system of `path`, or None for a local disk.

    Args:
        mounts: the content of `/proc/self/mountinfo`, see proc_pid_mountinfo(5).
    """
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


def check_disk(path: Path) -> None:
    """Raise StorageError if a SQLite file is on a network file system."""
    if kind := network_file_system(path):
        raise StorageError(
            f"A SQLite database must be on a disk of its host, but {path.absolute()} is on a network file "
            f"system ({kind}), where SQLite's locks do not work. {ADVICE}"
        )
