"""On a real Slurm, what befalls a job costs its trial no more than what follows its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import hpo_command, ok
from slurm import SlurmCluster
from tiny import write_study

from hpo.cluster.jobs import read_jobs
from hpo.cluster.slurm import cancel_jobs, number_of
from hpo.study.storage import open_storage
from hpo.study.study_record import StudyRecord

pytestmark = [pytest.mark.slurm, pytest.mark.postgres]


def submit(folder: Path, url: str, *options: str, seconds: float = 12) -> str:
    """Submit one worker to the partition `low` with a study of one trial; return the job's number.

    The trial trains for so long, on a fast machine too: what is to befall it takes Slurm some seconds.
    """
    write_study(
        folder,
        n_trials=1,
        training={"max_seconds": seconds, "batch_size": 8, "max_length": 64, "fp_precision": "fp32"},
        evaluation={"per_trial": 4},
        checkpoint={"every_seconds": 0.1},
    )
    submitted = hpo_command(folder, "submit", "tiny.yaml", "--slurm", "--storage", url, "--json", *options)
    job: str = ok(submitted).json["job"]
    return number_of(job)


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
    assert 0 < trial.telemetry["resumed_from_step"] <= trial.telemetry["num_steps"]
    assert len(trial.evaluations) == 4
    assert {worker.job for worker in record.workers} >= {f"slurm:hpo:{job}_0"}


def node_of(slurm: SlurmCluster, job: str) -> str:
    return slurm.run(f"squeue --job={job} --noheader --format=%N").strip()


def preempt(slurm: SlurmCluster, job: str) -> None:
    del job
    slurm.run("sbatch --partition=high --exclusive --nodes=2 --output=/dev/null --wrap", "sleep 1")


def requeue(slurm: SlurmCluster, job: str) -> None:
    slurm.run(f"scontrol requeue {job}_0")


def warn(slurm: SlurmCluster, job: str) -> None:
    slurm.run(f"scancel --signal=USR1 --batch {job}_0")


def come_to_the_time_limit(slurm: SlurmCluster, job: str) -> None:
    slurm.run(f"scontrol update jobid={job}_0 EndTime=now+50")  # it looks every 30 s who is to be warned


def kill_the_node(slurm: SlurmCluster, job: str) -> None:
    slurm.kill_node(node_of(slurm, job))


@pytest.mark.parametrize(
    ("befall", "seconds"),
    [(preempt, 12), (requeue, 12), (warn, 12), (kill_the_node, 12), (come_to_the_time_limit, 45)],
)
def test_a_job_that_is_requeued(
    befall: Callable[[SlurmCluster, str], None],
    seconds: float,
    slurm: SlurmCluster,
    postgres_url: str,
    tmp_path: Path,
) -> None:
    job = submit(tmp_path, postgres_url, "--signal-lead", "50", seconds=seconds)
    slurm.wait(lambda: has_checkpoint(tmp_path))
    befall(slurm, job)
    slurm.wait(lambda: slurm.states(job) != {f"{job}_0": "RUNNING"})
    slurm.start_missing_nodes()
    check_went_on(slurm, postgres_url, job)


def test_a_job_that_runs_on_where_slurm_has_lost_its_node(
    slurm: SlurmCluster, postgres_url: str, tmp_path: Path
) -> None:
    """Slurm runs it again elsewhere: two workers, and one trial that stays with the first while it lives."""

    def workers() -> int:
        return sum(worker.state == "live" for worker in read(postgres_url).workers)

    job = submit(tmp_path, postgres_url, seconds=25)
    slurm.wait(lambda: has_checkpoint(tmp_path))
    slurm.kill_slurmd(node_of(slurm, job))
    try:
        slurm.wait(lambda: workers() == 2)
        assert read(postgres_url).slots == {"open": 0, "running": 1, "done": 0}
        slurm.wait(lambda: slurm.states(job) == {f"{job}_0": "COMPLETED"}, 120)
    finally:
        slurm.start_missing_nodes()
    record = read(postgres_url)
    assert record.slots == {"open": 0, "running": 0, "done": 1}
    [trial] = record.trials
    assert (trial.number, trial.outcome) == (0, "complete")
    assert trial.telemetry.get("resumed_from_step") is None, "nobody took it from the first worker"
    assert len(trial.evaluations) == 4


def test_a_job_that_is_cancelled(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    """SIGTERM: the worker leaves in time and is not requeued; the next job goes on with its trial."""
    job = submit(tmp_path, postgres_url)
    slurm.wait(lambda: has_checkpoint(tmp_path))
    with open_storage(postgres_url) as storage:
        assert cancel_jobs([found.id for found in read_jobs(storage, "tiny")], "tiny") == [f"slurm:hpo:{job}"]
    slurm.wait(lambda: slurm.states(job) == {f"{job}_0": "CANCELLED"})
    record = read(postgres_url)
    assert record.slots == {"open": 1, "running": 0, "done": 0}
    assert [trial.outcome for trial in record.trials] == ["preempted"]
    check_went_on(slurm, postgres_url, submit(tmp_path, postgres_url))
