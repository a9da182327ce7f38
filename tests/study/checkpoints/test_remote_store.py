"""Checkpoints in a bucket, through fsspec."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpo.config.sections import CheckpointConfig
from hpo.errors import CheckpointError, InputError, LeaseLostError
from hpo.study.checkpoints.remote_store import RemoteCheckpoints, RemoteStore, open_remote_store
from hpo.training.checkpoint import FILES, CheckpointStore


@pytest.fixture
def store(s3: str) -> RemoteStore:
    return opened(s3, create=True)


def opened(location: str, *, create: bool = False) -> RemoteStore:
    store = open_remote_store(CheckpointConfig(location=location), create=create)
    assert store is not None
    return store


def folder_of(machine: Path, number: int = 0) -> Path:
    return machine / "tiny" / "checkpoints-0a1b2c3d" / f"trial-{number:05d}"


def mirror(store: RemoteStore, folder: Path) -> RemoteCheckpoints:
    lease: Any = SimpleNamespace(saved_step=0, check=lambda: None)
    return RemoteCheckpoints(store, lease, folder, threading.Event())


def trained(store: RemoteStore, folder: Path, key: str = "key", *, best: int = 2, steps: int = 3) -> None:
    with CheckpointStore(folder, key, mirror(store, folder)) as checkpoints:
        for step in range(1, steps + 1):
            state = {"step": step}
            checkpoints.save(
                step, {"w": torch.full((2,), step)}, state=state, best=state if step == best else None
            )
        checkpoints.finish(best)
        assert checkpoints.problems == []


def test_incomplete_upload_is_ignored(store: RemoteStore, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a")
    with CheckpointStore(folder, "key") as local:
        for step in (1, 2):
            local.save(step, {"w": torch.ones(2)}, state={"step": step})
            local.wait()
    store.upload(folder / "step-00000001", "key", folder)
    put = store._filesystem.put_file

    def break_off(source: str, target: str) -> None:
        if source.endswith(FILES[-1]):
            raise ConnectionError("gone")
        put(source, target)

    store._filesystem.put_file = break_off
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002 cannot be written to .*gone"):
            store.upload(folder / "step-00000002", "key", folder)
    finally:
        del store._filesystem.put_file
    assert [name[:13] for name in store.list(folder)] == ["step-00000001"]
    there = folder_of(tmp_path / "b")
    assert mirror(store, there).names("step", "key") == ["step-00000001"]
    store.upload(folder / "step-00000002", "key", folder)
    assert mirror(store, there).names("step", "key") == ["step-00000001", "step-00000002"]


def test_other_files_in_the_bucket_stay(store: RemoteStore, tmp_path: Path) -> None:
    for number in (0, 1):
        trained(store, folder_of(tmp_path / "a", number))
    filesystem, root = store._filesystem, store._root
    theirs = [
        f"{root}/checkpoints-0a1b2c3d/trial-00000/notes.txt",
        f"{root}/checkpoints-0a1b2c3d/trial-00000/step-00000001-mine/notes.txt",
        f"{root}/checkpoints-0a1b2c3d/trial-x/notes.txt",
        f"{root}/checkpoints-ffffffff/trial-00000/notes.txt",
    ]
    for path in theirs:
        filesystem.pipe_file(path, b"theirs")
    study_folder = folder_of(tmp_path / "b").parent
    assert store.trials(study_folder) == {0, 1}
    assert store.remove_trials(study_folder, {0, 7}) == 1
    assert store.list(study_folder / "trial-00000") == {}
    assert len(store.list(study_folder / "trial-00001")) == 2
    assert all(filesystem.exists(path) for path in theirs)


def test_worker_without_its_lease_uploads_nothing(store: RemoteStore, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a")

    def lost() -> None:
        raise LeaseLostError("another worker has it")

    lease: Any = SimpleNamespace(saved_step=0, check=lost)
    with (
        pytest.raises(LeaseLostError),
        CheckpointStore(folder, "key", RemoteCheckpoints(store, lease, folder, threading.Event())) as local,
    ):
        local.save(1, {"w": torch.ones(2)}, state={})
    assert store.list(folder) == {}


def test_unavailable_store_is_a_problem_of_the_trial(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An emptied bucket accepts no checkpoints."""
    monkeypatch.setattr(RemoteCheckpoints, "wait_seconds", 0.0)
    with pytest.raises(InputError, match=r"made together with the study, but it has no file"):
        opened(s3)
    store = opened(s3, create=True)
    store._filesystem.rm(store.marker)
    folder = folder_of(tmp_path / "a")
    with CheckpointStore(folder, "key", mirror(store, folder)) as checkpoints:
        assert checkpoints.latest() is None
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.ones(2)}, state={"step": step})
        checkpoints.wait()
        store._filesystem.pipe_file(store.marker, b"")
        checkpoints.save(3, {"w": torch.ones(2)}, state={"step": 3})
    (problem,) = checkpoints.problems
    assert "it has no file .hpo-artifacts, so it is away" in problem
    assert [name[:13] for name in store.list(folder)] == ["step-00000002", "step-00000003"]
