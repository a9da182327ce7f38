"""Kills during uploads of checkpoints, and continuation on another machine.

Each simulated machine is a folder with a `runs/` of its own; a user's `hpo run` starts there.
"""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
from support.command_line import FAULTY_HPO, AnyProcess, finish, kill, ok, start_hpo, stored, wait_until
from support.tiny import write_study

from hpo.training.checkpoint import FILES

STEPS = 60


def machine(folder: Path, location: str, every_seconds: float = 0.05, n_trials: int = 1) -> Path:
    """A folder with the study."""
    folder.mkdir(exist_ok=True)
    write_study(
        folder,
        n_trials=n_trials,
        training={"max_steps": STEPS, "batch_size": 8, "max_length": 64},
        checkpoint={"top_k": 1, "every_seconds": every_seconds, "location": location},
        evaluation={"per_trial": 2},
    )
    return folder


def start(folder: Path, *command: str) -> AnyProcess:
    """Start `hpo run` or another command. Files in `folder` make it wait."""
    url = f"sqlite:///{folder.parent}/runs/hpo.db"
    return start_hpo(
        folder, *(command or ("run", "tiny.yaml")), program=[FAULTY_HPO, "held"], HPO_STORAGE=url
    )


def kill_when(condition: Callable[[], bool], folder: Path) -> None:
    (folder.parent / "runs").mkdir()
    process = start(folder)
    wait_until(condition, process)
    kill(process)


def uploaded(location: str, number: int = 0) -> list[str]:
    """Return the complete checkpoints of a trial in the bucket."""
    filesystem, root = fsspec.url_to_fs(location, use_listings_cache=False)
    last = rf".*/checkpoints-\w+/trial-{number:05d}/([^/]{{13}})[^/]*/{re.escape(FILES[-1])}"
    return sorted(found[1] for path in filesystem.find(root) if (found := re.fullmatch(last, path)))


def test_another_machine_continues_from_the_bucket(tmp_path: Path, s3: str) -> None:
    first = machine(tmp_path / "a", s3)
    (first / "hold-45").touch()

    def are_uploaded() -> bool:
        before = uploaded(s3)
        time.sleep(1.0)  # longer than an upload, which a kill would tear
        return {name[:4] for name in before} == {"best", "step"} and uploaded(s3) == before

    kill_when(are_uploaded, first)
    steps = [int(name[5:]) for name in uploaded(s3) if name.startswith("step")]
    shutil.rmtree(first)

    ok(finish(start(machine(tmp_path / "b", s3, every_seconds=60, n_trials=2))))
    record = stored(tmp_path)
    assert record.counts == {"open": 0, "running": 0, "done": 2}
    assert record.trials[0].telemetry["resumed_from_step"] == max(steps), "the newest complete one"
    best = max(record.trials, key=lambda trial: trial.values).number
    assert [name[:4] for name in uploaded(s3, best)] == ["best", "step"], "the best and the last"
    assert uploaded(s3, 1 - best) == []

    third = machine(tmp_path / "c", s3, n_trials=2)
    command = ("best", "tiny.yaml", "--evaluate", "test", "--export", "model", "--json")
    assert ok(finish(start(third, *command))).json["evaluation"]["trial"] == best
    assert (third / "model" / "model.safetensors").exists()


def test_kill_during_an_upload(tmp_path: Path, s3: str) -> None:
    """An incomplete upload is no checkpoint; the next worker of the trial uploads it."""
    folder = machine(tmp_path / "a", s3, every_seconds=60)
    for file in ("no-uploads", "hold-45"):
        (folder / file).touch()
    kill_when((folder / "uploading").exists, folder)
    assert uploaded(s3) == []
    (folder / "no-uploads").unlink()
    process = start(machine(folder, s3))
    wait_until(lambda: "best-00000030" in uploaded(s3), process)
    (folder / "hold-45").unlink()
    ok(finish(process))
    [trial] = stored(tmp_path).trials
    assert (trial.outcome, trial.telemetry["num_steps"]) == ("complete", STEPS)
    assert trial.telemetry["resumed_from_step"] == 30
