"""Checkpoints that survive being killed: written atomically, verified when read.

A checkpoint is a folder with `model.safetensors`, `state.pt` (plain containers and tensors, read with
`weights_only=True`) and `manifest.json` with the SHA-256 of both. It is written under a temporary name,
flushed to disk and renamed, so a folder with its final name was complete when it got that name; one that
was damaged afterwards does not match its manifest and is passed over for the one before.

The manifest also holds the resume key: what must be equal for a trial to go on from there (configuration,
effective precision, device type). A store reads and replaces the checkpoints of its own key only.

    <trial folder>/
        step-00000120/      to go on from; the two newest while the trial runs, the last when it has ended
        best-00000080/      weights of the best evaluation
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpo.errors import CheckpointError, Preempted

_WEIGHTS, _STATE, _MANIFEST = "model.safetensors", "state.pt", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint; tensors on the CPU."""

    resume_key: str
    weights: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one trial under one resume key; a context manager that waits for the last write.

    A thread writes while the trial goes on. A failed write (a full disk) is raised as CheckpointError by the
    next call or at the end; it leaves nothing half-written and the checkpoints before as they were. It does
    not replace another exception that ends the trial, except `Preempted`, which promises a checkpoint.
    """

    def __init__(self, folder: Path, resume_key: str) -> None:
        self.folder = folder
        self.resume_key = resume_key
        self.write_seconds = 0.0
        """How long the last write took."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, Preempted):
                self.wait()
        finally:
            self._writer.shutdown()

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
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"there is no memory for the copy of checkpoint {self.folder}, step {step}: {error}. "
                "Run fewer workers on this machine."
            ) from error
        self._writing = self._writer.submit(self._save, step, weights, state, best)

    def wait(self) -> None:
        """Wait until what was saved is on the disk. Raises CheckpointError if it is not."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint of this key to go on from, or None."""
        return _newest_intact(self._own("step"))

    def best(self) -> Checkpoint | None:
        """The best weights of this key, or None if there are none or they are damaged."""
        return _newest_intact(self._own("best"))

    def finish(self) -> None:
        """Keep this key's best and last only."""
        self.wait()
        kept = [*self._own("best")[-1:], *self._own("step")[-1:]]
        for path in [*_named(self.folder, "best"), *_named(self.folder, "step"), *self.folder.glob(".*.tmp")]:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

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
                others = [old for old in self._own(kind) if old != path]
                for old in others[: len(others) + 1 - keep]:
                    shutil.rmtree(old, ignore_errors=True)
                written = path
        self.write_seconds = time.monotonic() - began


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """The best weights that a finished trial left in its folder, or None if they are missing or damaged."""
    return _newest_intact(_named(folder, "best"))


def _named(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}-????????"))


def _newest_intact(paths: list[Path]) -> Checkpoint | None:
    for path in reversed(paths):
        with contextlib.suppress(CheckpointError):
            return read_checkpoint(path)
    return None


def _resume_key(path: Path) -> str | None:
    """The key of a checkpoint; None where its manifest cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads((path / _MANIFEST).read_text())["resume_key"])
    return None


class NoCheckpoints:
    """Takes the place of a store for a trial that nobody will go on with: nothing is kept."""

    write_seconds = 0.0

    def __enter__(self) -> NoCheckpoints:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def save(self, *_: object, **__: object) -> None:
        pass

    def latest(self) -> None:
        return None

    def best(self) -> None:
        return None

    def finish(self) -> None:
        pass


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint. Raises CheckpointError if it is missing, torn or altered."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        for name, digest in manifest["sha256"].items():
            if _sha256(path / name) != digest:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} does not match its manifest.")
        weights = load_file(path / _WEIGHTS)
        state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    return Checkpoint(manifest["resume_key"], weights, state)


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if same_weights is not None:
            with contextlib.suppress(OSError):  # a file system without hard links
                (temporary / _WEIGHTS).hardlink_to(same_weights / _WEIGHTS)
        if not (temporary / _WEIGHTS).exists():
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary / _WEIGHTS)
        torch.save(dict(state), temporary / _STATE)
        names = (_WEIGHTS, _STATE)
        with ThreadPoolExecutor(max_workers=1) as disk:  # which is waited for while the hashes are made
            flushed = disk.map(_flush, [temporary / name for name in names])
            digests = {name: _sha256(temporary / name) for name in names}
            list(flushed)
        (temporary / _MANIFEST).write_text(json.dumps({"resume_key": key, "sha256": digests}))
        _flush(temporary / _MANIFEST)
        shutil.rmtree(path, ignore_errors=True)  # of the same step, before a restart
        temporary.rename(path)
        _flush(path.parent)
    # safetensors and torch.save report a full disk as errors of their own, not as OSError.
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        full = "No space left" in str(error)
        raise CheckpointError(
            f"checkpoint {path} could not be written: {error}.{' Free some space.' if full else ''} "
            "The trial goes on from the checkpoint before when the study is started again."
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
