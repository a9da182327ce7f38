"""Folders that go with the process that made them; those of a killed one go with the next.

Nothing tells from outside whether a process on another machine that shares the folder still lives. So the
owner holds a lock on a file in its folder, which the kernel lets go of when the process ends in any way.
"""

from __future__ import annotations

import fcntl
import shutil
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
        with (unnamed / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(folder)
            yield folder
    finally:
        shutil.rmtree(unnamed, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned_folders(parent: Path, prefix: str) -> None:
    """Remove the folders of `temporary_folder` whose process is gone; others of that name stay."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            with (folder / _LOCK).open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # none of these folders, just removed by its owner, or another user's
        except BlockingIOError:
            continue  # its owner lives
        shutil.rmtree(folder, ignore_errors=True)
