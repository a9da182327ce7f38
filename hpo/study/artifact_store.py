"""Optuna's artifact stores as a place of checkpoints: a folder of artifacts, or a bucket of an S3 service.

A folder that is not mounted looks like an empty one. It is told by a file in it that is missing, `MARKER`,
which is made together with the study: a worker that starts there is refused, and one that runs waits as for
any store that is away.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from optuna.artifacts import Boto3ArtifactStore, FileSystemArtifactStore
from optuna.artifacts.exceptions import ArtifactNotFound

from hpo.config.checkpoint_config import ARTIFACTS, S3, CheckpointConfig
from hpo.errors import CheckpointError, InputError, LeaseLostError, OutageError

_logger = logging.getLogger(__name__)

_ARTIFACT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MARKER = ".hpo-artifacts"
"""A file in a folder of artifacts."""


class _Backend(Protocol):
    """One of Optuna's artifact stores."""

    def open_reader(self, artifact_id: str) -> BinaryIO: ...
    def write(self, artifact_id: str, content_body: BinaryIO) -> None: ...
    def remove(self, artifact_id: str) -> None: ...


class ArtifactStore:
    """An artifact store that holds checkpoints, each an uncompressed tar archive.

    Args:
        marker: a file that is there unless the store is away.
    """

    def __init__(
        self, location: str, backend: _Backend, prefix: str = "", marker: Path | None = None
    ) -> None:
        self.location = location
        self.writing = threading.Lock()
        self._owed: list[Callable[[], None]] = []
        self._backend = backend
        self._prefix = prefix
        self._marker = marker

    def check(self) -> None:
        """Raise OutageError where a folder is known to be away."""
        if self._marker is not None and not self._marker.is_file():
            raise OutageError(f"{self.location} has no file {MARKER}, so it is not mounted here.")

    def write(self, artifact_id: str, archive: Path) -> None:
        self.check()
        with archive.open("rb") as file:
            self._backend.write(self._key(artifact_id), file)

    def owe(self, write: Callable[[], None]) -> None:
        """Have `write` called by a later `pay`: a finished trial did not come to it."""
        self._owed.append(write)

    def pay(self) -> None:
        """Write what is owed; to be called with the lock `writing`. Raises what the store raises."""
        while self._owed:
            with contextlib.suppress(LeaseLostError):  # the study is gone
                self._owed[0]()
            self._owed.pop(0)

    def settle(self, seconds: float) -> None:
        """Try for so long to write what is owed, before this process leaves."""
        deadline = time.monotonic() + seconds
        leaving = threading.Thread(target=self._pay_until, args=[deadline], name="artifacts", daemon=True)
        leaving.start()
        leaving.join(seconds)
        if self._owed:
            _logger.warning(
                "The best checkpoints of %d trials are not in %s, which did not take them. They stay where "
                "these trials ran.",
                len(self._owed),
                self.location,
            )

    def _pay_until(self, deadline: float) -> None:
        while self._owed and time.monotonic() < deadline:
            try:
                with self.writing:
                    self.pay()
            except Exception as error:  # of the store, whichever it is, or of the database
                _logger.info("%s: %s", self.location, error)
                time.sleep(1.0)

    def extract(self, artifact_id: str, folder: Path) -> None:
        """Write the files of an archive into `folder`; whatever else it holds is left out."""
        from hpo.training.checkpoint import FILES  # PyTorch

        self.check()
        with (
            self._backend.open_reader(self._key(artifact_id)) as file,
            tarfile.open(fileobj=file, mode="r|") as archive,
        ):
            for member in archive:
                if member.name in FILES and member.isreg():
                    archive.extract(member, folder, filter="data")

    def remove(self, artifact_id: str) -> None:
        """Remove an archive, if it is there."""
        self.check()
        with contextlib.suppress(ArtifactNotFound):
            self._backend.remove(self._key(artifact_id))

    def _key(self, artifact_id: str) -> str:
        if not _ARTIFACT_ID.fullmatch(artifact_id):
            raise CheckpointError(
                f"the database names an artifact {artifact_id!r}, which is no name of ours."
            )
        return self._prefix + artifact_id


def open_artifact_store(config: CheckpointConfig, *, create: bool = False) -> ArtifactStore | None:
    """The artifact store that a study names; None: it names none. A folder of checkpoints is made.

    Args:
        create: make a folder of artifacts, too, and mark it.

    Raises:
        InputError: it cannot be used. One that only does not answer now is no error.
    """
    location = config.location or ""
    if location.startswith(S3):
        bucket, _, prefix = location.removeprefix(S3).partition("/")
        prefix = prefix.strip("/")
        backend = Boto3ArtifactStore(bucket, _s3_client(bucket), avoid_buf_copy=True)
        return ArtifactStore(location, cast(Any, backend), f"{prefix}/" if prefix else "")
    if not location:
        return None
    folder = Path(location.removeprefix(ARTIFACTS))
    of_artifacts = location.startswith(ARTIFACTS)
    marker = folder / MARKER
    try:
        if create or not of_artifacts:
            folder.mkdir(parents=True, exist_ok=True)
        if create and of_artifacts:
            marker.touch()
    except OSError as error:
        raise InputError(f"checkpoint.location: {folder} cannot be made: {error.strerror}.") from None
    if not of_artifacts:
        return None
    if not marker.is_file():
        raise InputError(
            f"checkpoint.location: {folder} must be the folder that was made with the study, but it has no "
            f"file {MARKER}. Mount it here. Where it was moved or is lost, make an empty one with that file."
        )
    return ArtifactStore(location, cast(Any, FileSystemArtifactStore(folder)), marker=marker)


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
