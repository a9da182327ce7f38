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


def test_what_is_of_another_key_is_not_listed_and_goes_at_the_end(store: RemoteStore, tmp_path: Path) -> None:
    trained(store, folder_of(tmp_path / "a"), "a CUDA device's", best=9, steps=9)
    folder = folder_of(tmp_path / "b")
    with CheckpointStore(folder, "key", mirror(store, folder)) as checkpoints:
        assert checkpoints.latest() is None
    assert checkpoints.problems == []
    trained(store, folder)
    assert [name[:13] for name in store.list(folder)] == ["best-00000002", "step-00000003"]


def test_an_upload_that_was_not_finished_is_none(store: RemoteStore, tmp_path: Path) -> None:
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


def test_only_our_names_are_removed(store: RemoteStore, tmp_path: Path) -> None:
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


def test_a_worker_that_lost_its_trial_uploads_nothing(store: RemoteStore, tmp_path: Path) -> None:
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


def test_a_store_that_is_away_is_a_problem_of_the_trial(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that was emptied neither takes checkpoints, nor has lost them."""
    monkeypatch.setattr(RemoteCheckpoints, "wait_seconds", 0.0)
    with pytest.raises(
        InputError, match=r"must be the place that was made with the study, but it has no file"
    ):
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


@pytest.mark.usefixtures("s3")
def test_a_store_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"checkpoint\.location: .*file/store cannot be used: .*directory"):
        open_remote_store(CheckpointConfig(location=f"{tmp_path}/file/store"), create=True)
    with pytest.raises(InputError, match=r"s3://absent/prefix cannot be used: The specified bucket does not"):
        opened("s3://absent/prefix", create=True)


def test_location_is_relative_to_the_study_file(tmp_path: Path) -> None:
    def of(location: str) -> CheckpointConfig:
        return CheckpointConfig.model_validate({"location": location}, context={"folder": tmp_path})

    def base(config: CheckpointConfig) -> Path:
        return config.folder_of("tiny", "0123456789", Path("runs")).parents[1]

    assert base(of("shared")) == tmp_path / "shared"
    for location in ("s3://bucket/a/b", "gs://bucket"):
        assert of(location).location == location
    for config in (of("s3://bucket"), of("gs://bucket"), CheckpointConfig()):
        assert base(config) == Path("runs")


@pytest.mark.parametrize(
    "location", ["s3://key:secret@bucket/x", "s3://", "az://bucket", "s3://b/../c d", " ", "artifacts:kept"]
)
def test_other_locations_are_refused(location: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        CheckpointConfig(location=location)
