"""On a real Slurm, what befalls a job costs its trial no more than what follows its last checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import hpo_command, ok
from slurm import SlurmCluster
from tiny import write_study

from hpo.study.storage import open_storage
from hpo.study.study_record import StudyRecord

pytestmark = [pytest.mark.slurm, pytest.mark.postgres]
NUM_STEPS = 120


def submit(folder: Path, url: str, *options: str) -> str:
    """Submit one worker to the partition `low` with a study of one trial; return the job's number."""
    write_study(
        folder,
        n_trials=1,
        training={"max_steps": NUM_STEPS, "batch_size": 8, "max_length": 64, "fp_precision": "fp32"},
        evaluation={"per_trial": 4},
        checkpoint={"every_seconds": 0.1},
    )
    submitted = hpo_command(folder, "submit", "tiny.yaml", "--slurm", "--storage", url, "--json", *options)
    job: str = ok(submitted).json["job"]
    return job.removeprefix("slurm:")


def read(url: str) -> StudyRecord:
    with open_storage(url) as storage:
        return storage.read_study("tiny")


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("runs/tiny/checkpoints-*/trial-00000/step-*"))


def check_went_on(slurm: SlurmCluster, url: str, job: str) -> None:
    """The job ends by itself, and its one trial went on from a checkpoint after a restart."""
    slurm.wait(lambda: slurm.states(job) == {f"{job}_0": "COMPLETED"}, 120)
    record = read(url)
    assert record.slots == {"open": 0, "running": 0, "done": 1}
    [trial] = record.trials
    assert (trial.number, trial.outcome) == (0, "complete")
    assert trial.telemetry["num_steps"] == NUM_STEPS
    assert 0 < trial.telemetry["resumed_from_step"] < NUM_STEPS
    assert [row.step for row in trial.evaluations] == [30, 60, 90, 120]


def test_preempted_by_a_higher_partition(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    job = submit(tmp_path, postgres_url)
    slurm.wait(lambda: has_checkpoint(tmp_path))
    slurm.run("sbatch --partition=high --exclusive --nodes=2 --wrap", "sleep 1")
    slurm.wait(lambda: slurm.states(job) != {f"{job}_0": "RUNNING"})
    check_went_on(slurm, postgres_url, job)
