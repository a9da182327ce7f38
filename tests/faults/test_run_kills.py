"""`python -m hpo run` is killed or told to stop in a trial; run again, the study has lost nothing."""

from __future__ import annotations

import re
import shlex
import signal
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from command_line import finish, hpo_command, ok, start_hpo, stored, wait_until
from tiny import write_study

from hpo.study.claims.process import process_start
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.study.store.storage import open_storage

NUM_STEPS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a study whose trials last long enough to be met in the middle."""
    write(tmp_path, every_seconds=0.1)
    return tmp_path


def write(folder: Path, every_seconds: float) -> None:
    training = {"max_steps": NUM_STEPS, "batch_size": 8, "max_length": 64, "fp_precision": "fp32"}
    write_study(
        folder,
        training=training,
        evaluation={"per_trial": 4},
        checkpoint={"top_k": 9, "every_seconds": every_seconds},
    )


def resume(folder: Path) -> str:
    """Run the study to its end; what may change does: without the many checkpoints it is faster."""
    write(folder, every_seconds=30)
    return ok(hpo_command(folder, "run", "tiny.yaml")).out


def checkpoints(folder: Path, trial: int) -> list[str]:
    """Names of the checkpoints that a trial can go on from."""
    return sorted(path.name for path in folder.glob(f"runs/tiny/checkpoints-*/trial-{trial:05d}/step-*"))


def check_whole(record: StudyRecord, n_trials: int = 2) -> None:
    """As if nothing had happened: each trial once, complete, with all its steps and evaluations."""
    assert record.slots == {"open": 0, "running": 0, "done": n_trials}
    assert [trial.number for trial in record.trials] == list(range(n_trials))
    for trial in record.trials:
        assert (trial.state, trial.outcome) == ("COMPLETE", "complete")
        assert trial.telemetry["num_steps"] == NUM_STEPS
        assert [row.step for row in trial.evaluations] == [15, 30, 45, 60]


def check_went_on(before: TrialRecord, after: TrialRecord) -> None:
    assert before.state == "RUNNING"
    assert (after.number, after.params, after.started) == (before.number, before.params, before.started)
    assert 0 < after.telemetry["resumed_from_step"] < NUM_STEPS
    known = len(before.evaluations)
    for old, new in zip(before.evaluations, after.evaluations[:known], strict=True):
        # An evaluation that is made again in another process may differ in the last bits.
        then, now = pd.json_normalize(old.metrics), pd.json_normalize(new.metrics)
        pd.testing.assert_frame_equal(now, then, rtol=1e-5)


def test_killed_in_the_middle_of_a_trial(folder: Path) -> None:
    process = start_hpo(folder, "run", "tiny.yaml")
    wait_until(lambda: len(checkpoints(folder, trial=1)) == 2, process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    before = stored(folder)
    assert before.slots == {"open": 1, "running": 0, "done": 1}, "killed too late to test anything"
    assert before.trials[1].outcome == "preempted"
    status = ok(hpo_command(folder, "status", "tiny.yaml")).out
    assert "1 of 2 trials done, 0 running, 1 to come" in status
    assert "Unfinished, with no worker: 1. The next worker goes on with them." in status
    newest = checkpoints(folder, trial=1)[-1]

    assert "Study tiny (resumed): 1 of 2 trials done" in resume(folder)
    after = stored(folder)
    check_whole(after)
    assert after.trials[0] == before.trials[0], "a finished trial is not touched again"
    assert "resumed_from_step" not in after.trials[0].telemetry
    check_went_on(before.trials[1], after.trials[1])
    assert after.trials[1].telemetry["resumed_from_step"] == int(newest.removeprefix("step-"))
    assert after.trials[0].params != after.trials[1].params


def test_told_to_stop_with_two_workers(folder: Path) -> None:
    """What one does is in test_leaving.py."""
    options = ("--workers", "2")
    process = start_hpo(folder, "run", "tiny.yaml", *options)
    wait_until(lambda: bool(checkpoints(folder, trial=0)), process)
    process.terminate()
    stopped = finish(process)
    assert stopped.exit_code == 130, stopped
    again = shlex.join(["hpo", "run", "tiny.yaml", *options])
    before = stored(folder)
    done = before.slots["done"]
    assert f"Stopped and checkpointed: {done} of 2 trials done. To go on: {again}\n" in stopped.out
    assert not re.search("Error|Warning|Traceback", stopped.err)
    unfinished = [trial.number for trial in before.trials if trial.state == "RUNNING"]
    assert unfinished
    assert before.slots == {"open": 2 - done, "running": 0, "done": done}
    assert not any(worker.alive for worker in before.workers)
    steps = {number: checkpoints(folder, number)[-1] for number in unfinished if checkpoints(folder, number)}

    resume(folder)
    after = stored(folder)
    check_whole(after)
    for number, step in steps.items():
        check_went_on(before.trials[number], after.trials[number])
        found = after.trials[number].telemetry["resumed_from_step"]
        assert found == int(step.removeprefix("step-")), "no step is trained twice"


def test_killed_with_two_workers(folder: Path) -> None:
    """The workers see that the one that started them is gone, write their checkpoints and leave."""
    process = start_hpo(folder, "run", "tiny.yaml", "--workers", "2")
    wait_until(lambda: bool(checkpoints(folder, trial=0) and checkpoints(folder, trial=1)), process)
    pids = [worker.pid for worker in stored(folder).workers]
    started = [process_start(pid) for pid in pids]
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(begun and process_start(pid) == begun for pid, begun in zip(pids, started, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = stored(folder)
    assert before.slots["running"] == 0, "they gave their trials back"
    assert "preempted" in [trial.outcome for trial in before.trials]

    resume(folder)
    after = stored(folder)
    check_whole(after)
    for old, new in zip(before.trials, after.trials, strict=False):
        if old.state == "COMPLETE":
            assert replace(new, detailed={}) == old, "but that the best is evaluated in detail at the end"
        else:
            check_went_on(old, new)


def test_six_start_at_once_on_an_empty_database(tmp_path: Path, sqlite_url: str) -> None:
    write_study(tmp_path, n_trials=4)
    commands = [["init", "tiny.yaml", "--json"]] * 4
    commands += [["worker", "tiny.yaml", "--json"]] * 2
    processes = [start_hpo(tmp_path, *command, HPO_STORAGE=sqlite_url) for command in commands]
    finished = [ok(finish(process)) for process in processes]
    assert {each.err for each in finished} == {""}
    assert sum(each.json["outcomes"].get("complete", 0) for each in finished[4:]) == 4
    with open_storage(sqlite_url) as storage:
        record = read_study(storage, "tiny")
    assert record.slots == {"open": 0, "running": 0, "done": 4}
    assert [trial.outcome for trial in record.trials] == ["complete"] * 4
    assert len({str(trial.params) for trial in record.trials}) == 4
