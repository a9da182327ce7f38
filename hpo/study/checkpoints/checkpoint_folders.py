"""The folder of a study's checkpoints: its database, and its use from several machines.

Several databases may share one `runs/`, and `hpo copy` leaves two databases with the same checkpoints. So a
file in the folder names the last database of the study. That database alone removes the checkpoints.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from hpo.errors import CheckpointError, RunError
from hpo.study.claims.lease import Lease
from hpo.study.store.database import parse_url, sqlite_path
from hpo.study.store.storage import Storage

_NOTE = "database"


def noted_database(storage: Storage) -> str:
    """Return a text that identifies the database. A private PostgreSQL changes its host and port."""
    url = parse_url(storage.url)
    path = sqlite_path(url)
    if path is not None:
        return str(path.resolve())
    query = "SELECT system_identifier FROM pg_control_system()"
    number = storage.read(lambda connection: connection.exec_driver_sql(query).scalar_one())
    return f"{url.host or ''}:{url.port or 5432}/{url.database} of server {number}"


def note_database(folder: Path, storage: Storage) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NOTE).write_text(noted_database(storage))


def is_of(folder: Path, noted: str) -> bool:
    """Return true if the folder belongs to the database of `noted_database`, on any host."""
    note = folder / _NOTE
    return note.is_file() and note.read_text().partition("/")[2] == noted.partition("/")[2]


def remove_checkpoints(folder: Path, noted: str) -> str:
    """Remove a study's folder of checkpoints if it belongs to this database; return a sentence about it."""
    try:
        if not folder.is_dir():
            return f"There were no checkpoints in {folder}"
        if not is_of(folder, noted):
            note = folder / _NOTE
            whose = note.read_text() if note.is_file() else "an unknown database"
            return f"Its checkpoints stay in {folder}: {whose} has used them last"
        shutil.rmtree(folder)
    except OSError as error:
        raise RunError(f"The checkpoints in {folder} cannot be removed: {error.strerror}.") from None
    return f"Its checkpoints in {folder} are removed"


class FolderCheckpoints:
    """The checkpoints of one trial in a possibly shared folder (a `CheckpointMirror`).

    A network file system may show a new checkpoint late on another machine. So the database holds the step of
    the newest one, and the next worker waits for it.
    """

    wait_seconds = 20.0
    """NFS shows a file within `acregmax`/`acdirmax`, 60 s at most, and at once after the first read."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._newest = lease.saved_step

    def names(self, kind: str, _resume_key: str) -> Sequence[str]:
        """Return the existing checkpoints, even if they are not visible here yet."""
        return [f"step-{self._newest:08d}"] if kind == "step" and self._newest else []

    def fetch(self, path: Path, _resume_key: str) -> None:
        """Wait until a checkpoint can be read. Raises CheckpointError after `wait_seconds`."""
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                if path.parent.is_dir():
                    list(path.parent.iterdir())  # makes a network file system ask its server
                (path / "state.pt").read_bytes()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"checkpoint {path} was written by the trial's last worker, but cannot be read here "
                        f"after {self.wait_seconds:.0f} s: {error.strerror}. Do the workers share the folder?"
                    ) from None
            time.sleep(0.5)

    def sync(self, kept: Sequence[Path], _resume_key: str, *, is_last: bool = False) -> None:  # noqa: ARG002
        self._lease.saved_step = newest_step(kept, default=self._lease.saved_step)


def newest_step(kept: Sequence[Path], default: int) -> int:
    return max((int(path.name[5:]) for path in kept if path.name.startswith("step-")), default=default)
