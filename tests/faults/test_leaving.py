"""Real processes leave in time: on each signal in mid-training, before the end of their job, as a group."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from command_line import Finished, finish, hpo_command, ok, saved_steps, start_hpo, stored, wait_until
from tiny import write_long_study

NUM_STEPS = 200


def check_given_back(folder: Path, left: Finished, n_trials: int = 1) -> None:
    """The trials that a stopped run has begun are open, and nobody has them."""
    assert left.exit_code == 130, left
    record = stored(folder)
    assert record.slots == {"open": n_trials, "running": 0, "done": 0}
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
    write_long_study(tmp_path, 0.1, n_trials=1, max_steps=NUM_STEPS)
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

    write_long_study(tmp_path, 600, n_trials=1, max_steps=NUM_STEPS)
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    (trial,) = stored(tmp_path).trials
    assert trial.outcome == "complete"
    assert trial.telemetry["num_steps"] == NUM_STEPS
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
