"""`torchrun -m hpo run`: whatever happens to a rank, all end, and the trial has its outcome or goes on."""

import subprocess
from pathlib import Path

import pytest
from support.command_line import (
    FAULTY_HPO,
    Finished,
    finish,
    hpo_command,
    ok,
    saved_steps,
    start_python,
    stored,
    wait_until,
)
from support.tiny import write_study

pytestmark = pytest.mark.slow

NUM_STEPS = 12
ALL_END_IN = 120.0
"""Seconds: torchrun ends what does not leave by itself after 30."""


def write(folder: Path, n_trials: int = 2) -> None:
    training = {"max_steps": NUM_STEPS, "batch_size": 8, "micro_batch_size": 2, "max_length": 64}
    write_study(
        folder,
        n_trials=n_trials,
        training=training | {"fp_precision": "fp32"},
        evaluation={"per_trial": 3},
        checkpoint={"top_k": 9, "every_seconds": 0.01},
    )


def torchrun(folder: Path, *command: str) -> subprocess.Popen[str]:
    """Start two processes of `python COMMAND` in `folder`."""
    return start_python(
        folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command
    )


def run_with_faults(folder: Path, faults: str, rank: int) -> subprocess.Popen[str]:
    return torchrun(folder, FAULTY_HPO, f"ranks,{rank},{faults}", "run", "tiny.yaml", "--json")


def finish_all(process: subprocess.Popen[str], seconds: float) -> Finished:
    """Its end, and that of all processes that it started: they hold its output open."""
    try:
        return finish(process, seconds)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its processes, which are in sessions of their own
            process.communicate()


def check_goes_on(folder: Path) -> None:
    """One process continues the trial that was running, and the study ends as if nothing had happened."""
    before = stored(folder)
    assert before.counts == {"open": 2, "running": 0, "done": 0}
    assert not any(worker.alive for worker in before.workers)
    assert [(trial.state, trial.outcome) for trial in before.trials] == [("RUNNING", "preempted")]
    ok(hpo_command(folder, "run", "tiny.yaml"))
    after = stored(folder)
    assert [trial.outcome for trial in after.trials] == ["complete", "complete"]
    first = after.trials[0]
    assert (first.number, first.params) == (0, before.trials[0].params)
    assert 0 < first.telemetry["resumed_from_step"] < NUM_STEPS
    assert first.telemetry["num_steps"] == NUM_STEPS


@pytest.mark.parametrize(("fault", "rank"), [("killed", 0), ("raises", 1), ("hangs", 1)])
def test_trial_continues_after_a_lost_rank(tmp_path: Path, fault: str, rank: int) -> None:
    write(tmp_path)
    process = run_with_faults(tmp_path, fault, rank)
    wait_until((tmp_path / "fault").exists, process, 240)
    assert finish_all(process, ALL_END_IN).exit_code != 0
    check_goes_on(tmp_path)


def test_sigterm_stops_all_ranks(tmp_path: Path) -> None:
    write(tmp_path)
    process = torchrun(tmp_path, "-m", "hpo", "run", "tiny.yaml")
    wait_until(lambda: bool(saved_steps(tmp_path)), process, 240)
    process.terminate()
    stopped = finish_all(process, ALL_END_IN)
    assert "Stopped; running trials have a checkpoint: 0 of 2 trials ended." in stopped.out, stopped
    check_goes_on(tmp_path)


def test_a_study_is_run_by_two_ranks_and_each_failure_is_one_of_its_trial(tmp_path: Path) -> None:
    """In the first trial rank 1 gets NaN, in the second it runs out of memory; the third is as if there had
    been no other."""
    write(tmp_path, n_trials=3)
    finished = ok(finish_all(run_with_faults(tmp_path, "nan,memory", rank=1), 240))
    record = stored(tmp_path)
    assert [trial.outcome for trial in record.trials] == ["nonfinite", "oom", "complete"]
    assert finished.json["outcomes"] == {"nonfinite": 1, "oom": 1, "complete": 1}
    _, memory, complete = record.trials
    assert "rank 1 ran out of memory" in memory.reason
    assert complete.telemetry["num_ranks"] == 2
    assert len(record.workers) == 1, "the second rank is no worker"
    assert [row.step for row in complete.evaluations] == [4, 8, 12]
