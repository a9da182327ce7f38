"""`python -m hpo run` is killed or told to stop in a trial; run again, the study has lost nothing."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from support.command_line import Finished, finish, hpo_command, ok, saved_steps, start_hpo, stored, wait_until
from support.tiny import write_long_study

from hpo.study.claims.process import process_start
from hpo.study.reading.study_record import StudyRecord, TrialRecord

NUM_STEPS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a study whose trials last long enough to be met in the middle."""
    write_long_study(tmp_path, 0.1, per_trial=4, max_steps=NUM_STEPS)
    return tmp_path


def resume(folder: Path) -> str:
    """Run the study to its end; what may change does: without the many checkpoints it is faster."""
    write_long_study(folder, 30, per_trial=4, max_steps=NUM_STEPS)
    return ok(hpo_command(folder, "run", "tiny.yaml")).out


def check_whole(record: StudyRecord, n_trials: int = 2) -> None:
    """As if nothing had happened: each trial once, complete, with all its steps and evaluations."""
    assert record.counts == {"open": 0, "running": 0, "done": n_trials}
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
        then, now = pd.json_normalize(dict(old.metrics)), pd.json_normalize(dict(new.metrics))
        pd.testing.assert_frame_equal(now, then, rtol=1e-5)


def test_killed_in_the_middle_of_a_trial(folder: Path) -> None:
    process = start_hpo(folder, "run", "tiny.yaml")
    wait_until(lambda: len(saved_steps(folder, trial=1)) == 2, process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    before = stored(folder)
    assert before.counts == {"open": 1, "running": 0, "done": 1}, "killed too late to test anything"
    assert before.trials[1].outcome == "preempted"
    status = ok(hpo_command(folder, "status", "tiny.yaml")).out
    assert "1 of 2 trials ended, 0 running, 1 not started" in status
    assert "1 interrupted trial: the next worker continues there." in status
    newest = saved_steps(folder, trial=1)[-1]

    assert "Study tiny (resumed): 1 of 2 trials ended" in resume(folder)
    after = stored(folder)
    check_whole(after)
    assert after.trials[0] == before.trials[0], "a finished trial is not touched again"
    assert "resumed_from_step" not in after.trials[0].telemetry
    check_went_on(before.trials[1], after.trials[1])
    assert after.trials[1].telemetry["resumed_from_step"] == newest
    assert after.trials[0].params != after.trials[1].params


def test_killed_with_two_workers(folder: Path) -> None:
    """The workers see that the one that started them is gone, write their checkpoints and leave."""
    process = start_hpo(folder, "run", "tiny.yaml", "--workers", "2")
    wait_until(lambda: bool(saved_steps(folder, 0) and saved_steps(folder, 1)), process)
    pids = [worker.pid for worker in stored(folder).workers]
    started = [process_start(pid) for pid in pids]
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(begun and process_start(pid) == begun for pid, begun in zip(pids, started, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = stored(folder)
    assert before.counts["running"] == 0, "they gave their trials back"
    assert "preempted" in [trial.outcome for trial in before.trials]

    resume(folder)
    after = stored(folder)
    check_whole(after)
    for old, new in zip(before.trials, after.trials, strict=False):
        if old.state == "COMPLETE":
            assert replace(new, detailed={}) == old, "but that the best is evaluated in detail at the end"
        else:
            check_went_on(old, new)


# Told to stop

MANY_STEPS = 200


def check_given_back(folder: Path, left: Finished, n_trials: int = 1) -> None:
    """The trials that a stopped run has begun are open, and nobody has them."""
    assert left.exit_code == 130, left
    record = stored(folder)
    assert record.counts == {"open": n_trials, "running": 0, "done": 0}
    assert {trial.outcome for trial in record.trials} == {"preempted"}
    assert not any(worker.alive for worker in record.workers)


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT],
        [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM],  # a launcher that warns before it terminates
    ],
    ids=lambda numbers: "-".join(number.name for number in numbers),
)
def test_signal_in_mid_training(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """The trial is checkpointed where it is, and goes on there."""
    write_long_study(tmp_path, 0.1, n_trials=1, max_steps=MANY_STEPS)
    process = start_hpo(tmp_path, "run", "tiny.yaml")
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    for number in numbers:
        process.send_signal(number)
    left = finish(process)
    check_given_back(tmp_path, left)
    # Which of signals that come together is handled first, nobody says.
    assert any(f"Told to stop: {number.name}.\n" in left.err for number in numbers)
    assert ("Ctrl-C again ends at once" in left.err) == (numbers == [signal.SIGINT])
    step = saved_steps(tmp_path)[-1]

    write_long_study(tmp_path, 600, n_trials=1, max_steps=MANY_STEPS)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    (trial,) = stored(tmp_path).trials
    assert trial.outcome == "complete"
    assert trial.telemetry["num_steps"] == MANY_STEPS
    assert trial.telemetry["resumed_from_step"] == step, "no step is trained twice"


def test_end_of_the_job(tmp_path: Path) -> None:
    """A worker begins a trial however late it is, as nothing is known, and writes its checkpoint in time."""
    write_long_study(tmp_path, 600, n_trials=1, max_steps=10**7)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    end = int(time.time()) + 25
    left = finish(start_hpo(tmp_path, "worker", "tiny.yaml", SLURM_JOB_END_TIME=str(end)))
    check_given_back(tmp_path, left)
    assert "Told to stop: its job ends at 20" in left.err
    (checkpoint,) = tmp_path.glob("runs/tiny/checkpoints-*/trial-00000/step-*")
    assert checkpoint.stat().st_mtime < end
    assert saved_steps(tmp_path)[0] > 0


def test_supervisor_starts_a_killed_worker_again_and_passes_signals_on(tmp_path: Path) -> None:
    write_long_study(tmp_path, 0.1, max_steps=10**7)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    process = start_hpo(tmp_path, "worker", "tiny", "--workers", "2")
    wait_until(lambda: bool(saved_steps(tmp_path, 0) and saved_steps(tmp_path, 1)), process)
    killed = next(worker for worker in stored(tmp_path).workers if worker.trial_number == 0)
    reached = saved_steps(tmp_path, 0)[-1]
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(
        lambda: saved_steps(tmp_path, 0)[-1:] > [reached] and sorted(living(tmp_path)) == [0, 1], process
    )
    process.send_signal(signal.SIGUSR1)
    left = finish(process)
    check_given_back(tmp_path, left, n_trials=2)
    assert "was killed by SIGKILL; it is started again (1 of at most 10 times an hour)" in left.err
    assert len(stored(tmp_path).workers) == 3


def living(folder: Path) -> list[int]:
    """The trials of the workers that live and have one."""
    running = [worker for worker in stored(folder).workers if worker.alive]
    return [worker.trial_number for worker in running if worker.trial_number is not None]
