"""Checkpoints in a bucket of S3 or of Google Cloud Storage, shared by all workers.

`checkpoint.location` of a study names it, and fsspec reads and writes it:

    <location>/.hpo-artifacts               made together with the study; missing if the contents are lost
    <location>/checkpoints-1a2b3c4d/trial-00000/step-00000120-9f8e7d6c5b4a/
        model.safetensors, state.pt

A checkpoint with both files is complete. Its name ends in a digest of the resume key, so a trial finds only
checkpoints for its own key. After a failed upload the trial continues; the next one brings the checkpoint.
"""

import hashlib
import logging
import re
import shutil
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from hpo.config.sections import CheckpointConfig
from hpo.errors import CheckpointError, HpoError, InputError
from hpo.study.checkpoints.checkpoint_folders import is_of, newest_step
from hpo.study.claims.lease import Lease
from hpo.training.checkpoint import FILES

T = TypeVar("T")
_logger = logging.getLogger(__name__)

MARKER = ".hpo-artifacts"
_CHECKPOINT = re.compile(
    r"(?P<checkpoint>(step|best)-\d{8}-(?P<key>[0-9a-f]{12}))/"
    rf"(?P<file>{'|'.join(map(re.escape, FILES))})"
)
TRIAL_FOLDER = re.compile(r"trial-(\d{5,})")
_S3_OPTIONS = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}


class RemoteStore:
    """The checkpoints of studies at one location. Every method may raise CheckpointError."""

    def __init__(self, location: str, filesystem: Any, root: str) -> None:
        self.location = location
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self.marker = f"{self._root}/{MARKER}"

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            self._filesystem.info(self.marker)
            yield
        except Exception as error:  # each file system has its own
            why = f"{type(error).__name__}: {error}."
            if isinstance(error, FileNotFoundError) and MARKER in str(error):
                why = f"it has no file {MARKER}, so it is away."
            raise CheckpointError(f"{what} {self.location}: {why}") from error

    def list(self, folder: Path, key: str | None = None, *, whole: bool = True) -> dict[str, dict[str, int]]:
        """Return the file sizes of a trial's checkpoints by name, oldest first; unless `whole`, incomplete
        too.
        """
        base = self._path(folder)
        sizes: dict[str, dict[str, int]] = defaultdict(dict)
        with self._errors("checkpoints cannot be listed in"):
            for path, about in sorted(self._filesystem.find(base, detail=True).items()):
                match = _CHECKPOINT.fullmatch(path.removeprefix(f"{base}/"))
                if match and (key is None or match["key"] == _digest(key)):
                    sizes[match["checkpoint"]][match["file"]] = about["size"]
        return {name: files for name, files in sizes.items() if not whole or len(files) == len(FILES)}

    def upload(self, path: Path, key: str, folder: Path) -> None:
        name = f"{path.name}-{_digest(key)}"
        stored = self.list(folder, key, whole=False).get(name, {})
        if stored == {file: (path / file).stat().st_size for file in FILES}:
            return
        target = f"{self._path(folder)}/{name}"
        with self._errors(f"checkpoint {path.name} cannot be written to"):
            if stored:
                self._filesystem.rm(target, recursive=True)
            for file in FILES:
                self._filesystem.put_file(str(path / file), f"{target}/{file}")

    def fetch(self, name: str, folder: Path, target: Path) -> None:
        """Download a checkpoint, by its name in the store, to `target`."""
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with self._errors(f"checkpoint {target.name} cannot be read from"):
                temporary.mkdir(parents=True)
                for file in FILES:
                    self._filesystem.get_file(f"{self._path(folder)}/{name}/{file}", str(temporary / file))
                shutil.rmtree(target, ignore_errors=True)
                temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def fetch_newest(self, kind: str, folder: Path) -> None:
        """Download the newest `best` or `step` checkpoint of an ended trial, unless its folder has it."""
        names = [name for name in self.list(folder) if name.startswith(kind)]
        for name in names[-1:]:
            path = folder / name[: len("step-00000000")]
            if not path.is_dir():
                self.fetch(name, folder, path)

    def remove(self, folder: Path, keep: Callable[[str], bool] = lambda _: False) -> None:
        """Remove the checkpoints of a trial, complete or not, except the names to `keep`."""
        names = [name for name in self.list(folder, whole=False) if not keep(name)]
        with self._errors("checkpoints cannot be removed from"):
            for name in names:
                self._filesystem.rm(f"{self._path(folder)}/{name}", recursive=True)

    def trials(self, study_folder: Path) -> set[int]:
        base = f"{self._root}/{study_folder.name}"
        with self._errors("checkpoints cannot be listed in"):
            paths = self._filesystem.find(base)
        parts = (path.removeprefix(f"{base}/").split("/")[0] for path in paths)
        return {int(match[1]) for part in parts if (match := TRIAL_FOLDER.fullmatch(part))}

    def remove_trials(self, study_folder: Path, numbers: Collection[int]) -> int:
        """Remove all checkpoints of these trials; return the number of trials with checkpoints."""
        uploaded = self.trials(study_folder).intersection(numbers)
        for number in uploaded:
            self.remove(study_folder / f"trial-{number:05d}")
        return len(uploaded)

    def _path(self, folder: Path) -> str:
        return f"{self._root}/{folder.parent.name}/{folder.name}"


class RemoteCheckpoints:
    """The checkpoints of one trial in a store (a `CheckpointMirror`)."""

    wait_seconds = 60.0  # wait of a continued or ended trial for an unavailable store
    retry_seconds = 5.0

    def __init__(self, store: RemoteStore, lease: Lease, folder: Path, stop: threading.Event) -> None:
        self._store = store
        self._lease = lease
        self._folder = folder
        self._stop = stop

    def names(self, kind: str, resume_key: str) -> Sequence[str]:
        names = self._until_it_answers(lambda: self._store.list(self._folder, resume_key))
        return [name[: -len("-9f8e7d6c5b4a")] for name in names if name.startswith(kind)]

    def fetch(self, path: Path, resume_key: str) -> None:
        self._store.fetch(f"{path.name}-{_digest(resume_key)}", self._folder, path)

    def sync(self, kept: Sequence[Path], resume_key: str, *, is_last: bool = False) -> None:
        """Upload the kept checkpoints; remove replaced ones, and with `is_last` all others of the trial."""
        self._lease.check()

        def upload() -> None:
            for path in kept:
                self._store.upload(path, resume_key, self._folder)

        if is_last:
            self._until_it_answers(upload)
        else:
            upload()
        self._lease.saved_step = newest_step(kept, default=self._lease.saved_step)
        names = {f"{path.name}-{_digest(resume_key)}" for path in kept}

        def keep(name: str) -> bool:
            # A newer one is from the next worker of the trial.
            newer = not any(path.name[:4] == name[:4] and path.name > name for path in kept)
            return name in names or (newer and not is_last)

        self._store.remove(self._folder, keep)

    def _until_it_answers(self, action: Callable[[], T]) -> T:
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                return action()
            except CheckpointError:
                if time.monotonic() > deadline or self._stop.wait(self.retry_seconds):
                    raise


def open_remote_store(config: CheckpointConfig, *, create: bool = False) -> RemoteStore | None:
    """Return the store of a study, or None if its checkpoints are in a folder, which is created.

    `create` marks the store of a new study. Raises InputError if it cannot be used, not if it is silent now.
    """
    location = config.location
    if location is None:
        return None
    try:
        if not config.is_remote:
            Path(location).mkdir(parents=True, exist_ok=True)
            return None
        options = {"config_kwargs": _S3_OPTIONS} if location.startswith("s3:") else {}
        filesystem, root = fsspec.url_to_fs(location, use_listings_cache=False, **options)
    except (OSError, ImportError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"checkpoint.location: {location} cannot be used: {why}.") from None
    store = RemoteStore(location, filesystem, root)
    try:
        if create:
            filesystem.pipe_file(store.marker, b"checkpoints of hpo\n")
        filesystem.info(store.marker)
    except Exception as error:  # each file system has its own
        if isinstance(error, FileNotFoundError) and not create:
            raise InputError(
                f"checkpoint.location: {location} must have been made together with the study, but it "
                f"has no file {MARKER}. If its contents are lost, write an empty file of that name there."
            ) from None
        no_credentials = type(error).__name__ == "NoCredentialsError"
        if no_credentials or isinstance(error, FileNotFoundError | PermissionError):
            raise InputError(f"checkpoint.location: {location} cannot be used: {error}.") from None
        _logger.warning("%s does not answer now: %s", location, error)
    return store


def remove_uploads(config: CheckpointConfig, folder: Path, noted: str) -> str:
    """Remove a deleted study's uploaded checkpoints from the bucket; return a sentence about it."""
    if not config.is_remote:
        return ""
    if not is_of(folder, noted):
        return (
            f"Its checkpoints stay in {config.location}: nothing on this machine says that no other "
            "database has this study with them."
        )
    try:
        if (remote := open_remote_store(config)) is not None:
            remote.remove_trials(folder, remote.trials(folder))
    except HpoError as error:
        return f"Its checkpoints stay in {config.location}: {error}"
    return f"Its checkpoints in {config.location} are removed."


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:12]
