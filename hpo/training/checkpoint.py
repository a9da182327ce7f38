"""Checkpoints of a trial: written under a temporary name, flushed, renamed. They survive a kill.

A checkpoint is a folder with `model.safetensors` and `state.pt` (plain containers and tensors, read with
`weights_only=True`). If it is truncated later, the previous checkpoint is used. The header of the weights
holds the resume key: everything a resume must have in common (configuration, effective precision, device
type, shapes of the weights). A store reads and replaces only its own key. A failed write (a full disk) does
not end the trial: it keeps the previous checkpoints and is recorded in `problems`.

    <trial folder>/
        step-00000120/      for a resume: the two newest while the trial runs, then the last
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
    """A checkpoint in memory, with tensors on the CPU."""

    resume_key: str
    weights: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointMirror(Protocol):
    """A trial's checkpoints for other workers. All methods may raise CheckpointError."""

    def names(self, kind: str, resume_key: str, /) -> Sequence[str]:
        """Return the names of checkpoints of a kind: `step` or `best`."""

    def fetch(self, path: Path, resume_key: str, /) -> None:
        """Copy one checkpoint to `path`."""

    def sync(self, kept: Sequence[Path], resume_key: str, /, *, is_last: bool = False) -> None:
        """Copy all of `kept` and drop older ones, in the writing thread. `is_last`: the trial has ended."""


class CheckpointStore:
    """The checkpoints of one trial under one resume key. The end of the context waits for the last write.

    A thread writes during the training. A failed last write raises CheckpointError only for a `Preempted`
    trial, because this end promises a checkpoint.
    """

    def __init__(self, folder: Path, resume_key: str, mirror: CheckpointMirror | None = None) -> None:
        self.folder = folder
        self.resume_key = resume_key
        self.write_seconds = 0.0  # duration of the last write and its copy for other workers
        self.problems: list[str] = []  # messages of failures, each once
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
        """Write `weights` for a resume with `state`, as the best so far with `best`, or both."""
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
        """Wait for the current write. Raises CheckpointError if it fails and `must_be_written`."""
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
        """Return the newest intact checkpoint of this key for a resume, or None."""
        return self._newest("step")

    def best(self) -> Checkpoint | None:
        """Return the best weights of this key; None if they are missing or damaged."""
        return self._newest("best")

    def _newest(self, kind: str) -> Checkpoint | None:
        mirrored: set[str] = set()
        if self._mirror is not None:
            with self._noted():
                mirrored = set(self._mirror.names(kind, self.resume_key))
        passed: set[str] = set()
        # List again each time: during a wait for a file system, another worker may write.
        while names := ({path.name for path in _named(self.folder, kind)} | mirrored) - passed:
            path = self.folder / max(names)
            passed.add(path.name)
            with self._noted():
                if self._mirror is not None and path.name in mirrored and not path.is_dir():
                    self._mirror.fetch(path, self.resume_key)
                checkpoint = read_checkpoint(path)
                if checkpoint.resume_key == self.resume_key:
                    return checkpoint
                self._note(f"checkpoint {path} has another precision, device, data, model or version.")
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
        """Keep this key's last checkpoint and the best weights at `best_step`, or else the newest.

        Returns whether the weights at `best_step` exist. A full disk may prevent them.
        """
        self.wait()
        best = self._of_key("best")
        wanted = [path for path in best if path.name == f"best-{best_step:08d}"]
        kept = [*(wanted or best[-1:]), *self._of_key("step")[-1:]]
        for path in [*_named(self.folder, "best"), *_named(self.folder, "step"), *self.folder.glob(".*.tmp")]:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        self._sync(is_last=True)
        return bool(wanted)

    def share(self) -> None:
        """Wait until other workers can read the last checkpoint."""
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
                # Keep newer ones: they belong to another worker, after this one lost its lease.
                older = [old for old in self._of_key(kind) if old.name < path.name]
                for old in older[: len(older) + 1 - keep]:
                    shutil.rmtree(old, ignore_errors=True)
                written = path
        self._sync()
        self.write_seconds = time.monotonic() - began


class NoCheckpoints(CheckpointStore):
    """A store for a trial without a resume. It writes nothing."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), "")

    def save(self, *_: object, **__: object) -> None:
        pass

    def finish(self, _: int) -> bool:
        return True


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the best weights in the folder of a finished trial; None if they are missing or damaged."""
    return next(intact_checkpoints(folder, "best"), None)


def intact_checkpoints(folder: Path, kind: Literal["step", "best"]) -> Iterator[Checkpoint]:
    """Yield the intact checkpoints of a kind in a folder, of any key, the newest first."""
    for path in reversed(_named(folder, kind)):
        with contextlib.suppress(CheckpointError):
            yield read_checkpoint(path)


def bits_digest(weights: Mapping[str, Tensor]) -> str:
    """Return a hash of the bits, names, types and shapes of weights on the CPU."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint. Raises CheckpointError if it is missing or truncated, or contains code."""
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            key = (file.metadata() or {})[_KEY]
        weights = load_file(path / WEIGHTS)
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    return Checkpoint(key, weights, state)


def _resume_key(path: Path) -> str | None:
    with contextlib.suppress(*_UNREADABLE), safe_open(path / WEIGHTS, framework="pt") as file:
        return (file.metadata() or {}).get(_KEY)
    return None


def _named(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}-????????"))


def _copied(value: Any) -> Any:
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
    """Write a checkpoint. Its weights are a hard link to the weights of `same_weights`, if given."""
    # Process ids repeat on other machines with the same folder.
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
        shutil.rmtree(path, ignore_errors=True)  # the same step before a restart
        temporary.rename(path)
        _flush(path.parent)
    # safetensors and torch.save have their own errors for a full disk, not OSError.
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
