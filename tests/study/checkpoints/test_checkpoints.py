"""Checkpoints in a bucket or a shared folder, and the trials that keep theirs."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from hpo.config.sections import CheckpointConfig
from hpo.errors import InputError, LeaseLostError
from hpo.study.checkpoints.checkpoint_folders import FolderCheckpoints
from hpo.study.checkpoints.keep_best import keep_best_checkpoints
from hpo.study.checkpoints.remote_store import RemoteCheckpoints, RemoteStore, open_remote_store
from hpo.training.checkpoint import CheckpointStore


@pytest.fixture
def store(s3: str) -> RemoteStore:
    return opened(s3, create=True)


def opened(location: str, *, create: bool = False) -> RemoteStore:
    store = open_remote_store(CheckpointConfig(location=location), create=create)
    assert store is not None
    return store


def folder_of(machine: Path, number: int = 0) -> Path:
    return machine / "tiny" / "checkpoints-0a1b2c3d" / f"trial-{number:05d}"


def mirror(store: RemoteStore, folder: Path, check: Callable[[], object] = lambda: None) -> RemoteCheckpoints:
    """Checkpoints of a worker; `check` raises an error if it has lost its lease."""
    lease: Any = SimpleNamespace(saved_step=0, check=check)
    return RemoteCheckpoints(store, lease, folder, threading.Event())


def test_other_files_in_the_bucket_stay(store: RemoteStore, tmp_path: Path) -> None:
    for number in (0, 1):
        folder = folder_of(tmp_path / "a", number)
        with CheckpointStore(folder, "key", mirror(store, folder)) as checkpoints:
            for step in (1, 2, 3):
                best = {"step": step} if step == 2 else None
                checkpoints.save(step, {"w": torch.ones(2)}, state={"step": step}, best=best)
            checkpoints.finish(2)
    ours, filesystem = f"{store._root}/checkpoints-0a1b2c3d", store._filesystem
    folders = [f"{ours}/trial-00000", f"{ours}/trial-00000/step-00000001-mine", f"{ours}/trial-x"]
    theirs = [f"{path}/notes.txt" for path in (*folders, f"{store._root}/checkpoints-ffffffff/trial-00000")]
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

    with pytest.raises(LeaseLostError), CheckpointStore(folder, "key", mirror(store, folder, lost)) as local:
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


def test_folder_waits_for_a_checkpoint_of_another_machine(tmp_path: Path) -> None:
    """A network file system shows an older state for a while."""
    lease: Any = SimpleNamespace(saved_step=120)
    folder = FolderCheckpoints(lease)
    [name] = folder.names("step", "key")
    assert folder.names("best", "key") == []
    path = tmp_path / name
    waiting = threading.Thread(target=folder.fetch, args=[path, "key"])
    waiting.start()
    path.mkdir()
    (path / "state.pt").touch()
    waiting.join(60)
    assert not waiting.is_alive()


def remaining(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("trial-")) for path in folder.glob("trial-*")}


@pytest.mark.parametrize("directions", [["maximize"], ["minimize"], ["maximize", "minimize"]])
@pytest.mark.parametrize("top_k", [0, 2])
def test_best_trials_keep_their_checkpoints(tmp_path: Path, directions: list[str], top_k: int) -> None:
    trial_study = optuna.create_study(directions=directions)
    values = [(0.5, 9.0), (0.9, 9.0), (0.7, 8.0), (0.1, 1.0), (0.2, 9.0)]
    for value in values:
        trial_study.tell(trial_study.ask(), value[: len(directions)])
    trial_study.tell(trial_study.ask(), state=TrialState.PRUNED)
    trial_study.tell(trial_study.ask(), state=TrialState.FAIL)
    unfinished = trial_study.ask().number
    for number in range(unfinished + 1):
        (tmp_path / f"trial-{number:05d}" / "best-00000001").mkdir(parents=True)

    keep_best_checkpoints(trial_study, tmp_path, top_k)

    best_first = {
        ("maximize",): [1, 2, 0, 4, 3],
        ("minimize",): [3, 4, 0, 2, 1],
        ("maximize", "minimize"): [1, 2, 3, 0, 4],  # 3 is on the Pareto front, though 0 has a better value
    }[tuple(directions)]
    kept = remaining(tmp_path)
    assert kept == {*best_first[:top_k], unfinished}


def test_concurrently_ended_trial_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker ends the best one after each read of the trials."""
    opened = optuna.create_study(direction="maximize")
    opened.tell(opened.ask(), 0.1)
    others = [opened.ask() for _ in range(3)]
    for number in range(4):
        (tmp_path / f"trial-{number:05d}").mkdir()
    read = type(opened).get_trials

    def get_trials(self: optuna.Study, *args: Any, **options: Any) -> Any:
        found = read(self, *args, **options)
        if others:
            trial = others.pop(0)
            self.tell(trial, 0.5 + trial.number)
        return found

    monkeypatch.setattr(type(opened), "get_trials", get_trials)
    keep_best_checkpoints(opened, tmp_path, 1)
    assert {1, 2, 3} <= remaining(tmp_path)
