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
that none is forgotten in the store: one that is not there, or is torn, gives way to the one before. What
comes out of an archive is three files by their names, verified as every checkpoint is
(`hpo.training.checkpoint`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import sqlalchemy as sa
from optuna.artifacts import Boto3ArtifactStore, FileSystemArtifactStore
from optuna.artifacts.exceptions import ArtifactNotFound

from hpo.config.study_config import ARTIFACTS, S3, CheckpointConfig
from hpo.errors import CheckpointError, InputError, LeaseLostError, OutageError
from hpo.study.schema import artifacts

if TYPE_CHECKING:
    from hpo.study.leases import Lease
    from hpo.study.storage import Storage

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"(step|best)-\d{8}")
_ARTIFACT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ARCHIVE = ".to-store"
_FILES = ("model.safetensors", "state.pt", "manifest.json")


class _Backend(Protocol):
    """One of Optuna's artifact stores."""

    def open_reader(self, artifact_id: str) -> BinaryIO: ...
    def write(self, artifact_id: str, content_body: BinaryIO) -> None: ...
    def remove(self, artifact_id: str) -> None: ...


class ArtifactStore:
    """An artifact store that holds checkpoints, each an uncompressed tar archive."""

    def __init__(self, location: str, backend: _Backend, prefix: str = "") -> None:
        self.location = location
        self._backend = backend
        self._prefix = prefix

    def write(self, artifact_id: str, archive: Path) -> None:
        with archive.open("rb") as file:
            self._backend.write(self._key(artifact_id), file)

    def extract(self, artifact_id: str, folder: Path) -> None:
        """Write the files of an archive into `folder`; whatever else it holds is left out."""
        with (
            self._backend.open_reader(self._key(artifact_id)) as file,
            tarfile.open(fileobj=file, mode="r|") as archive,
        ):
            for member in archive:
                if member.name in _FILES and member.isreg():
                    archive.extract(member, folder, filter="data")

    def remove(self, artifact_id: str) -> None:
        """Remove an archive, if it is there."""
        with contextlib.suppress(ArtifactNotFound):
            self._backend.remove(self._key(artifact_id))

    def _key(self, artifact_id: str) -> str:
        if not _ARTIFACT_ID.fullmatch(artifact_id):
            raise CheckpointError(
                f"the database names an artifact {artifact_id!r}, which is no name of ours."
            )
        return self._prefix + artifact_id


def open_artifact_store(config: CheckpointConfig) -> ArtifactStore | None:
    """The artifact store that a study names; None: it names none. A folder is made.

    Raises:
        InputError: it cannot be used. One that only does not answer now is no error.
    """
    location = config.location or ""
    if location.startswith(S3):
        bucket, _, prefix = location.removeprefix(S3).partition("/")
        prefix = prefix.strip("/")
        backend = Boto3ArtifactStore(bucket, _s3_client(bucket), avoid_buf_copy=True)
        return ArtifactStore(location, cast(Any, backend), f"{prefix}/" if prefix else "")
    folder = Path(location.removeprefix(ARTIFACTS)) if location else None
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"checkpoint.location: {folder} cannot be made: {error.strerror}.") from None
    if folder is None or not location.startswith(ARTIFACTS):
        return None
    return ArtifactStore(location, cast(Any, FileSystemArtifactStore(folder)))


def _s3_client(bucket: str) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise InputError(
            "checkpoint.location: s3:// needs boto3. Run `pip install 'hpo[s3]'`, or name a folder."
        ) from None
    bounds = Config(connect_timeout=5, read_timeout=30, retries={"max_attempts": 2})
    try:
        client = boto3.client("s3", config=bounds)
        client.head_bucket(Bucket=bucket)
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if 400 <= status < 500:
            why = {404: "there is no such bucket", 403: "these credentials may not use it"}.get(status, error)
            raise InputError(f"checkpoint.location: the bucket {bucket!r}: {why}.") from None
        _logger.warning("The artifact store does not answer now: %s", error)
    except BotoCoreError as error:
        if not str(error).startswith(("Could not connect", "Connect timeout", "Read timeout")):
            raise InputError(f"checkpoint.location: {S3}{bucket}: {error}") from None
        _logger.warning("The artifact store does not answer now: %s", error)
    return client


class FolderCheckpoints:
    """The checkpoints of one trial in a folder that other workers may share.

    Says which step the newest has, as the one who goes on with the trial must find it.
    """

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

    def settle(self, seconds: float) -> None:
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
        self._store = store
        self._storage = storage
        self._lease = lease
        self._number = trial_number
        self._is_reported = is_reported
        self._known: dict[str, str] = {}  # checkpoint -> artifact id
        self._entered: dict[str, str] = {}  # likewise, of those that the store has not taken yet
        self._changed = threading.Condition()
        self._wanted: tuple[Sequence[Path], str] | None = None
        self._is_closing = False
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

    def settle(self, seconds: float) -> None:
        """Wait so long until the store holds what it is to hold, and end the thread."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._wanted is None, timeout=seconds):
                self._say(f"the last checkpoint is not in {self._store.location}, which did not take it.")
            self._is_closing = True
            self._wanted = None
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._is_closing)
                wanted = self._wanted
            if wanted is None:
                return
            try:
                self._sync(*wanted)
            except LeaseLostError:
                pass  # the trial hears of it at its next step
            except Exception as error:  # of the store, whichever it is, or of the database
                self._say(f"checkpoints wait for {self._store.location}: {type(error).__name__}: {error}")
                time.sleep(self.retry_seconds)
                continue
            with self._changed:
                if self._wanted is wanted:
                    self._wanted = None
                self._changed.notify_all()

    def _sync(self, kept: Sequence[Path], resume_key: str) -> None:
        stored = self._storage.attempt(lambda: _rows(self._storage, self._lease.study, self._number))
        own = {row.checkpoint: row.artifact_id for row in stored if row.resume_key == resume_key}
        others = {row.checkpoint: row.artifact_id for row in stored if row.resume_key != resume_key}
        for left in [left for path in kept[:1] for left in path.parent.glob(f"*{_ARCHIVE}")]:
            left.unlink(missing_ok=True)  # by a worker that was killed
        for path in kept:
            if (path.name not in own or path.name in self._entered) and path.is_dir():
                self._push(path, resume_key, replaced=others.get(path.name))
        self._lease.saved_step = _newest_step(kept, default=self._lease.saved_step)
        for name in own.keys() - {path.name for path in kept}:
            if any(path.name > name and path.name[:4] == name[:4] for path in kept):
                self._enter(name, None)
                self._entered.pop(name, None)
                self._store.remove(own[name])

    def _push(self, path: Path, resume_key: str, replaced: str | None) -> None:
        if not self._is_reported():
            raise OutageError("the evaluations before it are not in the database yet.")
        artifact_id = self._entered.get(path.name)
        artifact_id = artifact_id or f"trial-{self._number:05d}-{path.name}-{uuid.uuid4().hex}.tar"
        archive = path.with_name(f"{artifact_id}{_ARCHIVE}")
        try:
            # First as a whole: the checkpoint may be replaced while the store takes it, or before.
            try:
                with tarfile.open(archive, "w") as tar:
                    for name in _FILES:
                        tar.add(path / name, arcname=name)
            except FileNotFoundError:
                return  # replaced now; the next one is on its way
            if path.name not in self._entered:
                self._enter(path.name, (artifact_id, resume_key))
                self._entered[path.name] = artifact_id
            self._store.write(artifact_id, archive)
        finally:
            archive.unlink(missing_ok=True)
        del self._entered[path.name]
        if replaced is not None:
            self._store.remove(replaced)

    def _enter(self, checkpoint: str, artifact: tuple[str, str] | None) -> None:
        """Replace the row of a checkpoint, as the worker that has the trial."""
        key = {"study": self._lease.study, "trial_number": self._number, "checkpoint": checkpoint}

        def action() -> None:
            with self._storage.engine.begin() as connection:
                self._lease.hold(connection)
                same = (artifacts.c[name] == value for name, value in key.items())
                connection.execute(sa.delete(artifacts).where(*same))
                if artifact is not None:
                    artifact_id, resume_key = artifact
                    values = {**key, "artifact_id": artifact_id, "resume_key": resume_key}
                    connection.execute(sa.insert(artifacts).values(**values, created=self._storage.now))

        self._storage.attempt(action)

    def _say(self, problem: str) -> None:
        if problem not in self.problems:
            _logger.warning("Trial %d: %s", self._number, problem)
            self.problems.append(problem)


def fetch_best(store: ArtifactStore, storage: Storage, study: str, number: int, folder: Path) -> None:
    """Bring the best checkpoint of a trial that has ended into its folder, unless it is there.

    Raises CheckpointError if it cannot be had.
    """
    rows = storage.persist(lambda: _rows(storage, study, number))
    best = [row for row in rows if row.checkpoint.startswith("best") and _NAME.fullmatch(row.checkpoint)]
    for row in sorted(best, key=lambda row: row.created)[-1:]:
        path = folder / row.checkpoint
        if not (path / _FILES[-1]).exists():
            _fetch(store, row.artifact_id, path)


def drop_artifacts(store: ArtifactStore, storage: Storage, study: str, numbers: Collection[int]) -> None:
    """Remove all checkpoints of trials that have ended.

    With a store that is away they stay for a later call.
    ."""
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
