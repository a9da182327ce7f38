"""Checkpoints that survive being killed: written under a temporary name, flushed, renamed.

A checkpoint is a folder with `model.safetensors` and `state.pt` (plain containers and tensors, read with
`weights_only=True`). A folder with its final name was complete when it got that name. One that was cut short
afterwards does not fit its own header (safetensors) or directory (zip) and is passed over for the one before.

The header of the weights also holds the resume key: what must be equal for a trial to go on from there
(configuration, effective precision, device type, shapes of the weights). A store reads and replaces the
checkpoints of its own key only.

A write that fails (a full disk) does not end the trial: it leaves nothing half-written and the checkpoints
before as they were, and is one of the store's `problems`. So is why a trial does not go on from its newest
checkpoint.

    <trial folder>/
        step-00000120/      to go on from; the two newest while the trial runs, the last when it has ended
        best-00000080/      weights of the best evaluation
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpo.errors import CheckpointError, Preempted
from hpo.memory import is_out_of_memory

_logger = logging.getLogger(__name__)

FILES = WEIGHTS, STATE = "model.safetensors", "state.pt"
MAX_PROBLEMS = 20

_KEY = "resume_key"
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, SafetensorError, UnpicklingError)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read; tensors on the CPU."""

    resume_key: str
    weights: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointMirror(Protocol):
    """Where the checkpoints of a trial are for other workers, too. All methods may raise CheckpointError."""

    def names(self, kind: str, resume_key: str, /) -> Sequence[str]:
        """The checkpoints that are there, of a kind: `step` or `best`."""

    def fetch(self, path: Path, resume_key: str, /) -> None:
        """Bring one of them to its place here."""

    def sync(self, kept: Sequence[Path], resume_key: str, /, *, is_last: bool = False) -> None:
        """Copy what is kept here, and drop what it replaces; `is_last`: the trial is done.

        Called in the thread that writes checkpoints.
        """


class CheckpointStore:
    """The checkpoints of one trial under one resume key; a context manager that waits for the last write.

    A thread writes while the trial goes on. Only where the trial ends as `Preempted`, which promises a
    checkpoint, a last write that failed is raised, as CheckpointError.
    """

    def __init__(self, folder: Path, resume_key: str, mirror: CheckpointMirror | None = None) -> None:
        self.folder = folder
        self.resume_key = resume_key
        self.write_seconds = 0.0
        """How long the last write took, until other workers could read it."""
        self.problems: list[str] = []
        """What did not work, each once."""
        self._mirror = mirror
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait(must_be_written=kind is not None and issubclass(kind, Preempted))
        finally:
            self._writer.shutdown()

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        *,
        state: Mapping[str, Any] | None = None,
        best: Mapping[str, Any] | None = None,
    ) -> None:
        """Write `weights` with `state` as the checkpoint to go on from, with `best` as those of the best
        evaluation so far, or as both; then drop what they replace. Waits for the write before."""
        self.wait()
        try:
            self._writing = self._writer.submit(self._save, step, *_copied((weights, state, best)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._writing = Future()
            self._writing.set_exception(
                CheckpointError(
                    f"there is no memory for the copy of checkpoint {self.folder}, step {step}: {error}. "
                    "Run fewer workers on this machine."
                )
            )

    def wait(self, *, must_be_written: bool = False) -> None:
        """Wait until what was saved is on the disk, or has failed to be written.

        Raises CheckpointError if it failed and `must_be_written`.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except CheckpointError as error:
            self._note(str(error))
            if must_be_written:
                raise

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint of this key to go on from, or None."""
        return self._newest("step")

    def best(self) -> Checkpoint | None:
        """The best weights of this key, or None if there are none or they are damaged."""
        return self._newest("best")

    def _newest(self, kind: str) -> Checkpoint | None:
        mirrored: set[str] = set()
        if self._mirror is not None:
            with self._noted():
                mirrored = set(self._mirror.names(kind, self.resume_key))
        passed: set[str] = set()
        # Listed anew each time: a file system that was waited for may show more meanwhile.
        while names := ({path.name for path in _named(self.folder, kind)} | mirrored) - passed:
            path = self.folder / max(names)
            passed.add(path.name)
            with self._noted():
                if self._mirror is not None and path.name in mirrored and not path.is_dir():
                    self._mirror.fetch(path, self.resume_key)
                checkpoint = read_checkpoint(path)
                if checkpoint.resume_key == self.resume_key:
                    return checkpoint
                self._note(f"checkpoint {path} is of another precision, device, data, model or version.")
        return None

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._note(str(error))

    def _note(self, problem: str) -> None:
        _logger.warning("%s", problem)
        if problem not in self.problems and len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def finish(self, best_step: int) -> bool:
        """Keep of this key the last, and of the best evaluations that at `best_step`, or else the newest.

        Returns whether the weights at `best_step` are there; on a full disk they may not be.
        """
        self.wait()
        best = self._of_key("best")
        kept = [path for path in best if path.name == f"best-{best_step:08d}"]
        is_there = bool(kept)
        kept = [*(kept or best[-1:]), *self._of_key("step")[-1:]]
        for path in [*_named(self.folder, "best"), *_named(self.folder, "step"), *self.folder.glob(".*.tmp")]:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        self._sync(is_last=True)
        return is_there

    def share(self) -> None:
        """Wait until other workers can go on from what was saved, or that has failed."""
        self.wait()
        self._sync(is_last=True)

    def _sync(self, *, is_last: bool = False) -> None:
        if self._mirror is not None:
            kept = [*self._of_key("best"), *self._of_key("step")]
            with self._noted():
                self._mirror.sync(kept, self.resume_key, is_last=is_last)

    def _of_key(self, kind: str) -> list[Path]:
        return [path for path in _named(self.folder, kind) if _resume_key(path) == self.resume_key]

    def _save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any] | None,
        best: Mapping[str, Any] | None,
    ) -> None:
        written, began = None, time.monotonic()
        for kind, keep, content in (("best", 1, best), ("step", 2, state)):
            if content is not None:
                path = self.folder / f"{kind}-{step:08d}"
                _write(path, weights, content, self.resume_key, same_weights=written)
                # Older ones alone: a newer one is another worker's, which has taken over meanwhile.
                older = [old for old in self._of_key(kind) if old.name < path.name]
                for old in older[: len(older) + 1 - keep]:
                    shutil.rmtree(old, ignore_errors=True)
                written = path
        self._sync()
        self.write_seconds = time.monotonic() - began


class NoCheckpoints(CheckpointStore):
    """Of a trial that nobody will go on with: nothing is kept."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), "")

    def save(self, *_: object, **__: object) -> None:
        pass

    def finish(self, _: int) -> bool:
        return True


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """The best weights that a finished trial left in its folder, or None if they are missing or damaged."""
    return next(intact_checkpoints(folder, "best"), None)


def intact_checkpoints(folder: Path, kind: Literal["step", "best"]) -> Iterator[Checkpoint]:
    """The checkpoints of a kind that a trial left in its folder, of any key, the newest first."""
    for path in reversed(_named(folder, kind)):
        with contextlib.suppress(CheckpointError):
            yield read_checkpoint(path)


def bits_digest(weights: Mapping[str, Tensor]) -> str:
    """A hash of all bits of some weights, which are on the CPU, and of their names, types and shapes."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint. Raises CheckpointError if it is missing or torn, or holds code."""
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            key = (file.metadata() or {})[_KEY]
        weights = load_file(path / WEIGHTS)
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    return Checkpoint(key, weights, state)


def _resume_key(path: Path) -> str | None:
    """The key of a checkpoint; None where its weights cannot be read."""
    with contextlib.suppress(*_UNREADABLE), safe_open(path / WEIGHTS, framework="pt") as file:
        return (file.metadata() or {}).get(_KEY)
    return None


def _named(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}-????????"))


def _copied(value: Any) -> Any:
    """Nested containers with copies of their tensors, on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return value


def _write(
    path: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any], key: str, same_weights: Path | None
) -> None:
    """Write a checkpoint; its weights are a hard link to those of the checkpoint `same_weights`, if given."""
    # Process ids repeat on the machines that share a folder.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.mkdir(parents=True)
        if same_weights is not None:
            with contextlib.suppress(OSError):  # a file system without hard links
                (temporary / WEIGHTS).hardlink_to(same_weights / WEIGHTS)
        if not (temporary / WEIGHTS).exists():
            contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
            save_file(contiguous, temporary / WEIGHTS, metadata={_KEY: key})
        torch.save(dict(state), temporary / STATE)
        for name in FILES:
            _flush(temporary / name)
        shutil.rmtree(path, ignore_errors=True)  # of the same step, before a restart
        temporary.rename(path)
        _flush(path.parent)
    # safetensors and torch.save report a full disk as errors of their own, not as OSError.
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        advice = " Free some space." if "No space left" in str(error) else ""
        raise CheckpointError(
            f"a checkpoint in {path.parent} could not be written: {error}.{advice} "
            "The checkpoint before stays."
        ) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
