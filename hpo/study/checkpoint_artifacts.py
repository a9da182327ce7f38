"""Where the checkpoints of a trial are for other workers: a folder that they share, or an artifact store.

`checkpoint.location` of the study says which:

- left out, or a folder: checkpoints lie there alone (`FolderCheckpoints`). On a network file system a new one
  may not be seen at once from another machine, so the step of the newest is in the database, and whoever goes
  on with the trial looks for that one by its name for a while before it takes an older one.
- `artifacts:FOLDER` or `s3://BUCKET/PREFIX`: they are written under `runs/` and copied from there into one of
  Optuna's artifact stores (`ArtifactCheckpoints`), one archive each. The table `hpo_artifacts` says which
  there are. A thread copies, so training waits neither for a slow store nor for one that is away; it copies
  what there is to copy when the store is back.

An archive is entered in the table by the worker that has the trial, and only when the evaluations up to its
step are in the database, so that nobody goes on from behind one that is lost; and before it is written, so
that none is forgotten in the store: one that is not there, or is torn, gives way to the one before. Whether
it was written stands beside it, and whoever has the checkpoint writes one that was not. What comes out of an
archive is three files by their names, verified as every checkpoint is (`hpo.training.checkpoint`).

A trial that is done does not wait for a store that is away. What it owes is written after a checkpoint of a
later trial, or when the worker leaves.
"""

from __future__ import annotations

import logging
import re
import shutil
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa
from optuna.artifacts.exceptions import ArtifactNotFound

from hpo.errors import CheckpointError, LeaseLostError, OutageError
from hpo.study.artifact_store import ArtifactStore
from hpo.study.schema import artifacts, slots

if TYPE_CHECKING:
    from hpo.study.leases import Lease
    from hpo.study.storage import Storage

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"(step|best)-\d{8}")
_ARCHIVE = ".to-store"

LEAVE_SECONDS = 10.0
"""How long the end of a trial that goes on elsewhere waits for the store, and twice the last upload more."""
FINISH_SECONDS = 60.0
"""How long that of a finished one waits for a store that is slow; for one that is away, not at all."""


class FolderCheckpoints:
    """The checkpoints of one trial in a folder that other workers may share.

    Says which step the newest has, as the one who goes on with the trial must find it.
    """

    write_seconds = 0.0
    wait_seconds = 20.0
    """How long a checkpoint that was written elsewhere is waited for. NFS shows it within
    `acregmax`/`acdirmax`, 60 s at most, but at once to who opens it by its name, if nobody looked before."""

    def __init__(self, lease: Lease) -> None:
        self.problems: list[str] = []
        self._lease = lease
        self._newest = lease.saved_step

    def names(self, kind: str, _resume_key: str) -> Sequence[str]:
        """The checkpoints that there must be, whether they can be seen here or not."""
        return [f"step-{self._newest:08d}"] if kind == "step" and self._newest else []

    def fetch(self, path: Path) -> None:
        """Wait until a checkpoint can be read. Raises CheckpointError if it cannot."""
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                if path.parent.is_dir():
                    list(path.parent.iterdir())  # makes a network file system ask its server
                (path / "manifest.json").read_bytes()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"checkpoint {path} was written by the trial's last worker, but cannot be read here "
                        f"after {self.wait_seconds:.0f} s: {error.strerror}. Do the workers share the folder?"
                    ) from None
            time.sleep(0.5)

    def sync(self, kept: Sequence[Path], _resume_key: str) -> None:
        """Note the newest of those that are kept now."""
        self._lease.saved_step = _newest_step(kept, default=self._lease.saved_step)

    def end(self, how: object) -> None:
        """Everything is where it must be."""


def _newest_step(kept: Sequence[Path], default: int) -> int:
    steps = (int(path.name[5:]) for path in kept if path.name.startswith("step-"))
    return max(steps, default=default)


class ArtifactCheckpoints:
    """The checkpoints of one trial in an artifact store.

    Args:
        is_reported: whether all evaluations that the trial has made are in the database.
    """

    wait_seconds = 60.0
    """How long a trial that goes on waits for a store that is away."""
    retry_seconds = 5.0

    def __init__(
        self,
        store: ArtifactStore,
        storage: Storage,
        lease: Lease,
        trial_number: int,
        is_reported: Callable[[], bool] = lambda: True,
    ) -> None:
        self.problems: list[str] = []
        self.write_seconds = 0.0
        self._store = store
        self._storage = storage
        self._lease = lease
        self._number = trial_number
        self._is_reported = is_reported
        self._known: dict[str, str] = {}  # checkpoint -> artifact id
        self._changed = threading.Condition()
        self._wanted: tuple[Sequence[Path], str] | None = None
        self._is_failing = False
        self._is_closing = False
        self._is_finished = False
        self._thread: threading.Thread | None = None

    # Reading

    def names(self, kind: str, resume_key: str) -> Sequence[str]:
        """The checkpoints in the store that a trial with this key can go on from."""
        rows = self._storage.persist(lambda: _rows(self._storage, self._lease.study, self._number))
        self._known = {row.checkpoint: row.artifact_id for row in rows if row.resume_key == resume_key}
        return [name for name in self._known if name.startswith(kind) and _NAME.fullmatch(name)]

    def fetch(self, path: Path) -> None:
        """Bring a checkpoint here. Raises CheckpointError if it cannot be had."""
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                return _fetch(self._store, self._known[path.name], path)
            except CheckpointError as error:
                is_final = isinstance(error.__cause__, ArtifactNotFound | tarfile.TarError)
                if is_final or self._storage.stop.is_set() or time.monotonic() > deadline:
                    raise
            self._storage.stop.wait(self.retry_seconds)

    # Writing

    def sync(self, kept: Sequence[Path], resume_key: str) -> None:
        """Have the store hold what is kept, and no older checkpoint of this key; returns at once."""
        with self._changed:
            self._wanted = tuple(kept), resume_key
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="artifacts", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def end(self, how: Literal["finished", "preempted", "dropped"]) -> None:
        """The trial has no further checkpoint here. Where somebody wants the last, wait for the store.

        A finished trial waits only while the store works, and owes it the rest.
        """
        waits = {"finished": FINISH_SECONDS, "preempted": LEAVE_SECONDS + 2 * self.write_seconds}
        deadline = time.monotonic() + waits.get(how, 0.0)
        stop = self._storage.stop
        with self._changed:
            while self._wanted and time.monotonic() < deadline:
                if how == "finished" and (self._is_failing or stop.is_set()):
                    break
                self._changed.wait(0.1)
            wanted, self._wanted = self._wanted, None
            self._is_closing = True
            self._changed.notify_all()
        if wanted and how in waits:
            self._say(f"the last checkpoint is not in {self._store.location}, which did not take it.")
        if wanted and how == "finished":
            self._is_finished = True
            self._store.owe(lambda: self._sync(*wanted))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._is_closing)
                wanted = self._wanted
            if wanted is None:
                return
            problem = ""
            try:
                with self._store.writing:
                    self._sync(*wanted)
                    self._store.pay()
            except LeaseLostError:
                pass  # the trial hears of it at its next step
            except Exception as error:  # of the store, whichever it is, or of the database
                problem = f"checkpoints wait for {self._store.location}: {type(error).__name__}: {error}"
                self._say(problem)
            with self._changed:
                self._is_failing = bool(problem)
                if self._wanted is wanted and not problem:
                    self._wanted = None
                self._changed.notify_all()
                if problem:
                    self._changed.wait_for(lambda: self._is_closing, timeout=self.retry_seconds)

    def _sync(self, kept: Sequence[Path], resume_key: str) -> None:
        rows = self._storage.attempt(lambda: _rows(self._storage, self._lease.study, self._number))
        stored = {row.checkpoint: row for row in rows}
        for left in [left for path in kept[:1] for left in path.parent.glob(f"*{_ARCHIVE}")]:
            left.unlink(missing_ok=True)  # by a worker that was killed
        for path in kept:
            row = stored.get(path.name)
            if not (row and row.written and row.resume_key == resume_key) and path.is_dir():
                self._push(path, resume_key, row)
        self._lease.saved_step = _newest_step(kept, default=self._lease.saved_step)
        for name in stored.keys() - {path.name for path in kept}:
            newer = any(path.name > name and path.name[:4] == name[:4] for path in kept)
            if newer and stored[name].resume_key == resume_key:
                self._change(sa.delete(artifacts), name)
                self._store.remove(stored[name].artifact_id)

    def _push(self, path: Path, resume_key: str, row: sa.Row[Any] | None) -> None:
        """Enter a checkpoint and write it, also in place of one of another key and one that is torn."""
        if not self._is_reported():
            raise OutageError("the evaluations before it are not in the database yet.")
        began = time.monotonic()
        artifact_id = f"trial-{self._number:05d}-{path.name}-{uuid.uuid4().hex}.tar"
        if row is not None and row.resume_key == resume_key:
            artifact_id = row.artifact_id
        archive = path.with_name(f"{artifact_id}{_ARCHIVE}")
        try:
            if not _pack(path, archive):
                return
            self._change(sa.delete(artifacts), path.name, enters=(artifact_id, resume_key))
            if row is not None:
                self._store.remove(row.artifact_id)
            self._store.write(artifact_id, archive)
        finally:
            archive.unlink(missing_ok=True)
        self._change(sa.update(artifacts).values(written=True), path.name)
        self.write_seconds = time.monotonic() - began

    def _change(
        self, statement: sa.Delete | sa.Update, checkpoint: str, enters: tuple[str, str] | None = None
    ) -> None:
        """Change the row of a checkpoint, and enter a new one, as the worker that has the trial."""
        key = {"study": self._lease.study, "trial_number": self._number, "checkpoint": checkpoint}

        def action() -> None:
            with self._storage.engine.begin() as connection:
                self._hold(connection)
                connection.execute(statement.where(*(artifacts.c[name] == key[name] for name in key)))
                if enters is not None:
                    artifact_id, resume_key = enters
                    values = {**key, "artifact_id": artifact_id, "resume_key": resume_key}
                    connection.execute(sa.insert(artifacts).values(**values, created=self._storage.now))

        self._storage.attempt(action)

    def _hold(self, connection: sa.Connection) -> None:
        if not self._is_finished:
            self._lease.hold(connection)
            return
        # Nobody else has a trial that is done.
        same = (slots.c.study == self._lease.study, slots.c.trial_number == self._number)
        if connection.execute(sa.select(slots.c.slot).where(*same)).first() is None:
            raise LeaseLostError(f"Trial {self._number} is no longer in the database.")

    def _say(self, problem: str) -> None:
        if problem not in self.problems:
            _logger.warning("Trial %d: %s", self._number, problem)
            self.problems.append(problem)


def fetch_newest(
    kind: str, store: ArtifactStore, storage: Storage, study: str, number: int, folder: Path
) -> None:
    """Bring the newest `best` or `step` checkpoint of an ended trial into its folder, unless it is there.

    Raises CheckpointError if it cannot be had.
    """
    rows = storage.persist(lambda: _rows(storage, study, number))
    named = [row for row in rows if row.checkpoint.startswith(kind) and _NAME.fullmatch(row.checkpoint)]
    for row in sorted(named, key=lambda row: row.created)[-1:]:
        path = folder / row.checkpoint
        if not path.is_dir():
            _fetch(store, row.artifact_id, path)


def drop_artifacts(store: ArtifactStore, storage: Storage, study: str, numbers: Collection[int]) -> None:
    """Remove all checkpoints of trials that have ended. With a store that is away they stay for later."""
    for row in _rows(storage, study):
        if row.trial_number not in numbers:
            continue
        try:
            store.remove(row.artifact_id)
        except Exception as error:  # of the store, whichever it is
            _logger.warning("Old checkpoints stay in %s: %s", store.location, error)
            return
        with storage.engine.begin() as connection:
            same = (artifacts.c.study == study, artifacts.c.artifact_id == row.artifact_id)
            connection.execute(sa.delete(artifacts).where(*same))


def num_artifacts(storage: Storage, study: str, numbers: Collection[int] | None = None) -> int:
    """How many checkpoints of a study, or of these trials of it, are in its store."""
    rows = storage.persist(lambda: _rows(storage, study))
    return sum(numbers is None or row.trial_number in numbers for row in rows)


def _rows(storage: Storage, study: str, number: int | None = None) -> Sequence[sa.Row[Any]]:
    """Of a trial, or of all; those are few: of the best and of those that run."""
    query = sa.select(artifacts).where(artifacts.c.study == study)
    if number is not None:
        query = query.where(artifacts.c.trial_number == number)
    with storage.engine.connect() as connection:
        return connection.execute(query).all()


def _pack(path: Path, archive: Path) -> bool:
    """Write a checkpoint into one file, as it may be replaced meanwhile; False: it was replaced before."""
    from hpo.training.checkpoint import FILES  # PyTorch

    try:
        with tarfile.open(archive, "w") as tar:
            for name in FILES:
                tar.add(path / name, arcname=name)
    except FileNotFoundError:
        return False
    return True


def _fetch(store: ArtifactStore, artifact_id: str, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
        store.extract(artifact_id, temporary)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    except Exception as error:  # of the store, whichever it is
        raise CheckpointError(
            f"checkpoint {path.name} cannot be read from {store.location}: {error}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
