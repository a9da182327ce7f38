"""Checkpoints that cannot be written, read or reached: the trial goes on from what there is, and says why.

`hpo run` as a user starts it, each machine with a `runs/` folder of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT, Finished, finish, ok, start_hpo, wait_until
from forked_program import ForkedProgram
from tiny import write_study

from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.store.storage import open_storage
from hpo.training.checkpoint import FILES, CheckpointStore

MakeMachine = Callable[..., "Machine"]
HELD = ROOT / "tests" / "held_hpo.py"
STEPS = 200
TRAINING = {"max_steps": STEPS, "batch_size": 8, "max_length": 64}


class Machine:
    """A machine of the study: a folder in which `hpo` runs."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._url = url
        folder.mkdir()
        self._processes: list[ForkedProgram] = []

    def write(self, location: str | None, every_seconds: float = 0.05, **changes: Any) -> None:
        checkpoint: dict[str, Any] = {"top_k": 1, "every_seconds": every_seconds}
        checkpoint |= {"location": location} if location else {}
        write_study(
            self.folder,
            **{"n_trials": 1, "training": TRAINING, "checkpoint": checkpoint, **changes},
            evaluation={"per_trial": 2},
        )

    def start(self, *arguments: str) -> ForkedProgram:
        command = arguments or ("run", "tiny.yaml")
        process = start_hpo(self.folder, *command, program=[str(HELD)], HPO_STORAGE=self._url)
        self._processes.append(process)
        return process

    def hold(self, *files: str) -> None:
        """See `held_hpo`."""
        for file in files:
            (self.folder / file).touch()

    def release(self, file: str) -> None:
        (self.folder / file).unlink()

    def end(self) -> None:
        """End what a failed test left running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                finish(process)

    def run(self, *arguments: str) -> Finished:
        return ok(finish(self.start(*arguments)))

    def run_until(self, condition: Callable[[], bool], number: signal.Signals = signal.SIGKILL) -> Finished:
        """Run the study until something holds, then send a signal."""
        process = self.start()
        wait_until(condition, process)
        process.send_signal(number)
        return finish(process)

    def checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob("runs/tiny/checkpoints-*/trial-00000/step-????????"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/hpo.db"


@pytest.fixture
def machine(tmp_path: Path, url: str) -> Iterator[MakeMachine]:
    """Makes machines of the study, by their names."""
    made: list[Machine] = []

    def make(name: str) -> Machine:
        made.append(Machine(tmp_path / name, url))
        return made[-1]

    yield make
    for each in made:
        each.end()


def stored(url: str) -> StudyRecord:
    with open_storage(url) as storage:
        return read_study(storage, "tiny")


def telemetry(url: str) -> dict[str, Any]:
    """Of the one trial, which is complete with all its steps."""
    [trial] = stored(url).trials
    assert trial.outcome == "complete", trial
    assert trial.telemetry["num_steps"] == STEPS
    assert [row.step for row in trial.evaluations] == [STEPS // 2, STEPS]
    return dict(trial.telemetry)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# Damaged


def test_damaged_checkpoint(url: str, machine: MakeMachine) -> None:
    """The one before is taken."""
    a = machine("a")
    a.write(None)
    a.run_until(lambda: len(a.checkpoints()) == 2)
    before, damaged = a.checkpoints()
    weights = damaged / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    a.write(None, every_seconds=30)
    a.run()
    known = telemetry(url)
    assert known["resumed_from_step"] == step_of(before)
    assert re.search(rf"{damaged.name} cannot be read", " ".join(known["checkpoint_problems"]))


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of a few megabytes can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_a_problem_and_the_next_checkpoint_is_tried(small_disk: Path) -> None:
    """PyTorch and safetensors have their own errors for it."""
    filler = small_disk / "filler"
    filler.write_bytes(b"\0" * (shutil.disk_usage(small_disk).free - 20_000))
    with CheckpointStore(small_disk / "trial", "key") as store:
        for step in (1, 2):
            store.save(step, {"w": torch.ones(100_000)}, state={"step": step})
            store.wait()
            filler.unlink(missing_ok=True)
        [problem] = store.problems
        assert re.search(r"could not be written: .*No space left on device.* Free some space", problem)
        last = store.latest()
    assert last is not None
    assert last.state == {"step": 2}, "there was room again"


# Other machines


class Store:
    """A folder to which checkpoints are uploaded, and how a study names it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = f"artifacts:{folder}"

    def checkpoints(self, number: int = 0) -> list[str]:
        """The complete ones of a trial."""
        last = self.folder.glob(f"checkpoints-*/trial-{number:05d}/*/{FILES[-1]}")
        return sorted(path.parent.name[:13] for path in last)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_another_machine_goes_on_from_the_store(url: str, machine: MakeMachine, store: Store) -> None:
    first, second, third = (machine(name) for name in "abc")
    first.write(store.location)
    first.hold("hold-150")

    def are_uploaded() -> bool:
        before = store.checkpoints()
        time.sleep(1.0)  # longer than an upload, which a kill would tear
        return {name[:4] for name in before} == {"best", "step"} and store.checkpoints() == before

    first.run_until(are_uploaded)
    steps = [int(name[5:]) for name in store.checkpoints() if name.startswith("step")]
    shutil.rmtree(first.folder)

    second.write(store.location, every_seconds=60, n_trials=2)
    second.run()
    record = stored(url)
    assert record.slots == {"open": 0, "running": 0, "done": 2}
    assert record.trials[0].telemetry["resumed_from_step"] == max(steps), "the newest complete one"
    best = max(record.trials, key=lambda trial: trial.values).number
    assert [name[:4] for name in store.checkpoints(best)] == ["best", "step"], "the best and the last"
    assert store.checkpoints(1 - best) == []

    third.write(store.location, n_trials=2)
    found = third.run("best", "tiny.yaml", "--evaluate", "test", "--export", "model", "--json")
    assert found.json["evaluation"]["trial"] == best
    assert (third.folder / "model" / "model.safetensors").exists()


def test_killed_during_an_upload(url: str, machine: MakeMachine, store: Store) -> None:
    """What is half there is no checkpoint; whoever goes on with the trial uploads it."""
    a = machine("a")
    a.write(store.location, every_seconds=60)
    a.hold("no-uploads", "hold-150")
    a.run_until((a.folder / "uploading").exists)
    assert store.checkpoints() == []
    a.release("no-uploads")
    a.write(store.location)
    process = a.start()
    wait_until(lambda: "best-00000100" in store.checkpoints(), process)
    a.release("hold-150")
    ok(finish(process))
    assert telemetry(url)["resumed_from_step"] == 100
