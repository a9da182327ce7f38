"""Checkpoints that survive being killed: written atomically, verified when read.

A checkpoint is a folder with `model.safetensors`, `state.pt` (plain containers and tensors, read with
`weights_only=True`) and `manifest.json` with the SHA-256 of both. It is written under a temporary name,
flushed to disk and renamed, so a folder with its final name was complete when it got that name; one that
was damaged afterwards does not match its manifest and is passed over for the one before.

The manifest also holds the resume key: what must be equal for a trial to go on from there (configuration,
effective precision, device type). A store reads and replaces the checkpoints of its own key only.

A write that fails (a full disk) does not end the trial: it leaves nothing half-written and the checkpoints
before as they were, is told as one of the store's `problems`, and the next write is tried all the same. So is
why a trial does not go on from its newest checkpoint.

    <trial folder>/
        step-00000120/      to go on from; the two newest while the trial runs, the last when it has ended
        best-00000080/      weights of the best evaluation
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpo.errors import CheckpointError, Preempted

_logger = logging.getLogger(__name__)

FILES = WEIGHTS, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"
MAX_PROBLEMS = 20


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint; tensors on the CPU."""

    resume_key: str
    weights: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointMirror(Protocol):
    """Where the checkpoints of a trial are for other workers, too."""

    problems: list[str]
    """What did not work."""
    write_seconds: float
    """How long it took to take the last checkpoint."""

    def names(self, kind: str, resume_key: str, /) -> Sequence[str]:
        """The checkpoints that are there, of a kind: `step` or `best`."""

    def fetch(self, path: Path, /) -> None:
        """Bring one of them to its place here. Raises CheckpointError if it cannot be had."""

    def sync(self, kept: Sequence[Path], resume_key: str, /) -> None:
        """Take what is kept here, and drop those of this key that it replaces; returns at once."""

    def end(self, how: Literal["finished", "preempted", "dropped"], /) -> None:
        """The trial has no further checkpoint here: it is done, goes on elsewhere, or nobody wants its last.

        Waits for that, for a while."""


class CheckpointStore:
    """The checkpoints of one trial under one resume key; a context manager that waits for the last write.

    A thread writes while the trial goes on. Only where the trial ends as `Preempted`, which promises a
    checkpoint, a last write that failed is raised, as CheckpointError.
    """

    def __init__(self, folder: Path, resume_key: str, mirror: CheckpointMirror | None = None) -> None:
        self.folder = folder
        self.resume_key = resume_key
        self._write_seconds = 0.0
        self._problems: list[str] = []
        self._is_failing = False
        self._mirror = mirror
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_preempted = kind is not None and issubclass(kind, Preempted)
        try:
            self.wait(must_be_written=is_preempted)
        finally:
            self._writer.shutdown()
            if self._mirror is not None:
                self._mirror.end("finished" if kind is None else "preempted" if is_preempted else "dropped")

    @property
    def write_seconds(self) -> float:
        """How long the last write took, until other workers could read it."""
        return self._write_seconds + (self._mirror.write_seconds if self._mirror else 0.0)

    @property
    def problems(self) -> list[str]:
        """What did not work, each once."""
        return [*self._problems, *(self._mirror.problems if self._mirror else ())]

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        *,
        state: Mapping[str, Any] | None = None,
        best: Mapping[str, Any] | None = None,
        copy: bool = True,
    ) -> None:
        """Write `weights` with `state` as the checkpoint to go on from, with `best` as those of the best
        evaluation so far, or as both; then drop what they replace. Waits for the write before.

        Without `copy`, what is given must not change until it is written."""
        self.wait()
        try:
            if copy:
                weights, state, best = _copied((weights, state, best))
            self._writing = self._writer.submit(self._save, step, weights, state, best)
        except (RuntimeError, MemoryError) as error:
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
            self._is_failing = False
        except CheckpointError as error:
            if not self._is_failing:  # said once, not at every interval
                self._note(str(error))
            self._is_failing = True
            if must_be_written:
                raise

    def latest(self, shapes: Mapping[str, torch.Size] | None = None) -> Checkpoint | None:
        """The newest intact checkpoint of this key to go on from, or None.

        With `shapes`, those of the trial's weights by their names, one of another model is passed over.
        """
        return self._newest("step", shapes)

    def best(self, shapes: Mapping[str, torch.Size] | None = None) -> Checkpoint | None:
        """The best weights of this key, or None if there are none or they are damaged; `shapes` as above."""
        return self._newest("best", shapes)

    def _newest(self, kind: str, shapes: Mapping[str, torch.Size] | None) -> Checkpoint | None:
        mirrored = set(self._mirror.names(kind, self.resume_key)) if self._mirror else set()
        passed: set[str] = set()
        # Listed anew each time: a file system that was waited for may show more meanwhile.
        while names := ({path.name for path in _named(self.folder, kind)} | mirrored) - passed:
            path = self.folder / max(names)
            passed.add(path.name)
            try:
                if self._mirror is not None and path.name in mirrored and not (path / MANIFEST).exists():
                    self._mirror.fetch(path)
                if _resume_key(path) not in (None, self.resume_key):
                    self._note(f"checkpoint {path} is of another precision, device, data or version.")
                    continue
                found = read_checkpoint(path)
            except CheckpointError as error:
                self._note(str(error))
                continue
            if shapes is not None and shapes != {name: w.shape for name, w in found.weights.items()}:
                self._note(f"checkpoint {path} is of another model.")
            else:
                return found
        return None

    def _note(self, problem: str) -> None:
        _logger.warning("%s", problem)
        if problem not in self._problems and len(self._problems) < MAX_PROBLEMS:
            self._problems.append(problem)

    def finish(self, best_step: int) -> None:
        """Keep of this key the last, and of the best evaluations that at `best_step`, or else the newest."""
        self.wait()
        best = self._own("best")
        kept = [path for path in best if path.name == f"best-{best_step:08d}"] or best[-1:]
        kept += self._own("step")[-1:]
        for path in [*_named(self.folder, "best"), *_named(self.folder, "step"), *self.folder.glob(".*.tmp")]:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        self._sync()

    def _sync(self) -> None:
        if self._mirror is not None:
            self._mirror.sync([*self._own("best"), *self._own("step")], self.resume_key)

    def _own(self, kind: str) -> list[Path]:
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
                older = [old for old in self._own(kind) if old.name < path.name]
                for old in older[: len(older) + 1 - keep]:
                    shutil.rmtree(old, ignore_errors=True)
                written = path
        self._write_seconds = time.monotonic() - began
        self._sync()


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """The best weights that a finished trial left in its folder, or None if they are missing or damaged."""
    return next(intact_checkpoints(folder, "best"), None)


def intact_checkpoints(folder: Path, kind: Literal["step", "best"]) -> Iterator[Checkpoint]:
    """The checkpoints of a kind that a trial left in its folder, of any key, the newest first."""
    for path in reversed(_named(folder, kind)):
        with contextlib.suppress(CheckpointError):
            yield read_checkpoint(path)


def _named(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}-????????"))


def _resume_key(path: Path) -> str | None:
    """The key of a checkpoint; None where its manifest cannot be read."""
    with contextlib.suppress(CheckpointError):
        return _read_manifest(path)[0]
    return None


def _read_manifest(path: Path) -> tuple[str, dict[str, str]]:
    """The key of a checkpoint, and the SHA-256 of its two files."""
    try:
        match json.loads((path / MANIFEST).read_text()):
            case {"resume_key": str(key), "sha256": dict(digests)} if digests.keys() == {WEIGHTS, STATE}:
                return key, digests
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    raise CheckpointError(f"checkpoint {path} cannot be read: its manifest must hold a key and two digests.")


class NoCheckpoints:
    """Takes the place of a store for a trial that nobody will go on with: nothing is kept."""

    write_seconds = 0.0
    problems: Sequence[str] = ()

    def __enter__(self) -> NoCheckpoints:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def save(self, *_: object, **__: object) -> None:
        pass

    def latest(self, _: object = None) -> None:
        return None

    best = latest

    def finish(self, _: int) -> None:
        pass


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint. Raises CheckpointError if it is missing, torn or altered."""
    key, digests = _read_manifest(path)
    try:
        for name, digest in digests.items():
            if _sha256(path / name) != digest:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} does not match its manifest.")
        weights = load_file(path / WEIGHTS)
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    return Checkpoint(key, weights, state)


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
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary / WEIGHTS)
        torch.save(dict(state), temporary / STATE)
        names = (WEIGHTS, STATE)
        with ThreadPoolExecutor(max_workers=1) as disk:  # which is waited for while the hashes are made
            flushed = disk.map(_flush, [temporary / name for name in names])
            digests = {name: _sha256(temporary / name) for name in names}
            list(flushed)
        (temporary / MANIFEST).write_text(json.dumps({"resume_key": key, "sha256": digests}))
        _flush(temporary / MANIFEST)
        shutil.rmtree(path, ignore_errors=True)  # of the same step, before a restart
        temporary.rename(path)
        _flush(path.parent)
    # safetensors and torch.save report a full disk as errors of their own, not as OSError.
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        full = "No space left" in str(error)
        raise CheckpointError(
            f"checkpoint {path} could not be written: {error}.{' Free some space.' if full else ''} "
            "The checkpoint before stays."
        ) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
