"""Folders that go with the process that made them; those of a killed one go with the next on its machine.

The owner holds a lock on a file in its folder, which the kernel lets go of when the process ends in any way.
The file names the machine: some network file systems keep the locks of each machine to itself.
"""

from __future__ import annotations

import fcntl
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = "owner.lock"


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end of the block."""
    # It gets its name when it is locked: one whose lock nobody holds is taken for abandoned.
    unnamed = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    folder = parent / unnamed.name.removeprefix(".")
    try:
        with (unnamed / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.write(socket.gethostname())
            lock.flush()
            unnamed.rename(folder)
            yield folder
    finally:
        shutil.rmtree(unnamed, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned_folders(parent: Path, prefix: str) -> None:
    """Remove the folders of `temporary_folder` whose process is gone; others of that name stay."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                if lock.read() != socket.gethostname():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives, or has just removed it; or it is none of these, or another user's
        shutil.rmtree(folder, ignore_errors=True)
