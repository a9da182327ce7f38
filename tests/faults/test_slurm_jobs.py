"""Faults of jobs on a real Slurm. A trial loses only the work after its last checkpoint."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import ROOT, hpo_command, ok, saved_steps
from support.container import PYTHON, make_image, make_programs, path_with, why_no_container
from support.postgres import PostgresServer, stopped
from support.slurm import SlurmCluster
from support.tiny import write_long_study

from hpo.cluster.postgres.postgres_server import write_secret
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.store.storage import open_storage

pytestmark = [pytest.mark.slurm, pytest.mark.postgres]


def submit(folder: Path, url: str, *options: str, seconds: float = 12) -> str:
    """Submit one worker to the partition `low` with one trial of this length; return the job's number."""
    write_long_study(folder, 0.1, n_trials=1, per_trial=4, max_seconds=seconds)
    submitted = hpo_command(folder, "submit", "tiny.yaml", "--slurm", "--storage", url, "--json", *options)
    return str(ok(submitted).json["job"])


def read(url: str) -> StudyRecord:
    with open_storage(url) as storage:
        return read_study(storage, "tiny")


def check_continued(slurm: SlurmCluster, url: str, job: str) -> None:
    """Wait for the end of the job; check that its trial continued from a checkpoint."""
    slurm.wait(lambda: {*slurm.states(job).values()} == {"COMPLETED"}, 120)
    record = read(url)
    assert record.counts == {"open": 0, "running": 0, "done": 1}
    [trial] = record.trials
    assert (trial.number, trial.outcome) == (0, "complete")
    assert 0 < trial.telemetry["resumed_from_step"] <= trial.telemetry["num_steps"]
    assert len(trial.evaluations) == 4
    assert {worker.job for worker in record.workers} >= {f"slurm:hpo:{task}" for task in slurm.states(job)}


def warn_and_wait_for_requeue(slurm: SlurmCluster, job: str) -> None:
    slurm.run(f"scancel --signal=USR1 --batch {job}")
    slurm.wait(lambda: slurm.run(f"squeue --job={job} --noheader --format=%r").strip() == "BeginTime")


def preempt(slurm: SlurmCluster, job: str) -> None:
    del job
    slurm.run("sbatch --partition=high --exclusive --nodes=2 --output=/dev/null --wrap", "sleep 1")


def reach_time_limit(slurm: SlurmCluster, job: str) -> None:
    slurm.run(f"scontrol update jobid={job}_0 EndTime=now+50")  # Slurm checks the limit every 30 s


def kill_node(slurm: SlurmCluster, job: str) -> None:
    slurm.kill_node(slurm.run(f"squeue --job={job} --noheader --format=%N").strip())


def wait_for_progress(slurm: SlurmCluster, job: str, folder: Path) -> None:
    before, running = saved_steps(folder)[-1:], {f"{job}_0": "RUNNING"}
    slurm.wait(lambda: slurm.states(job) == running and saved_steps(folder)[-1:] > before, 120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "seconds"), [((preempt, kill_node), 14), ((reach_time_limit,), 45)], ids=["faults", "time"]
)
def test_requeued_job_continues_trial(
    slurm: SlurmCluster,
    postgres_url: str,
    tmp_path: Path,
    faults: tuple[Callable[[SlurmCluster, str], None], ...],
    seconds: float,
) -> None:
    options = ("--sbatch", "signal=B:USR1@50") if reach_time_limit in faults else ()
    job = submit(tmp_path, postgres_url, *options, seconds=seconds)
    for fault in faults:
        wait_for_progress(slurm, job, tmp_path)
        fault(slurm, job)
        slurm.wait(lambda: slurm.states(job) != {f"{job}_0": "RUNNING"})
        slurm.start_missing_nodes()
    check_continued(slurm, postgres_url, job)


def test_requeued_job_waits_for_database(
    slurm: SlurmCluster, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """The warning comes during an outage of the database. The next job continues the trial."""
    write_long_study(tmp_path, 0.1, n_trials=1, per_trial=4, max_seconds=6)
    script = tmp_path / "job.sh"
    with postgres_server.database() as url:
        ok(hpo_command(tmp_path, "init", "tiny.yaml", "--storage", url))
        write_secret(tmp_path / "url", url)
        script.write_text(
            f"#!/bin/sh\nexport HPO_STORAGE=@{tmp_path}/url PYTHONPATH={ROOT}\n"
            f"exec {sys.executable} -m hpo worker tiny\n"
        )
        options = f"--parsable --requeue --chdir={tmp_path} --output={tmp_path}/%j.log"
        job = slurm.run(f"sbatch {options}", str(script)).strip()
        slurm.wait(lambda: bool(saved_steps(tmp_path)))
        with stopped(postgres_server):
            warn_and_wait_for_requeue(slurm, job)
            slurm.wait(lambda: slurm.states(job) == {job: "RUNNING"})
        check_continued(slurm, url, job)


@pytest.mark.skipif(bool(why_no_container()), reason=why_no_container() or "it can")
@pytest.mark.parametrize("runtime", ["apptainer", pytest.param("pyxis", marks=pytest.mark.slow)])
def test_requeue_and_cancel_job_in_container(
    slurm: SlurmCluster, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    """The worker receives its signals, and asks Slurm for the requeue."""
    make_programs(tmp_path)
    monkeypatch.setenv("PATH", path_with(tmp_path))
    (tmp_path / "setup").write_text("set -u\nexport OMP_NUM_THREADS=1\n")
    image = str(make_image(tmp_path))
    options = (f"--{runtime}", image, "--python", PYTHON, "--setup", "setup")
    job = submit(tmp_path, postgres_url, *options)
    slurm.wait(lambda: bool(saved_steps(tmp_path)) or slurm.states(job) == {f"{job}_0": "FAILED"})
    warn_and_wait_for_requeue(slurm, job)
    wait_for_progress(slurm, job, tmp_path)
    slurm.run(f"scancel {job}")
    slurm.wait(lambda: slurm.states(job) == {f"{job}_0": "CANCELLED"})
    assert [trial.outcome for trial in read(postgres_url).trials] == ["preempted"]
    check_continued(slurm, postgres_url, submit(tmp_path, postgres_url, *options))


def test_preempted_array_keeps_paused_trials(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    """Two of four trials continue after the first rung, and one to the end."""
    promote = {"name": "promote", "starts": 0.2, "keep": 1, "reduction_factor": 2}
    write_long_study(tmp_path, 0.1, n_trials=4, per_trial=5, max_seconds=8, pruner=promote)
    options = ("--slurm", "--workers", "2", "--storage", postgres_url, "--json")
    job = str(ok(hpo_command(tmp_path, "submit", "tiny.yaml", *options)).json["job"])
    slurm.wait(lambda: any(trial.outcome == "paused" for trial in read(postgres_url).trials), 120)
    preempt(slurm, job)
    slurm.wait(lambda: "PENDING" in slurm.states(job).values())
    slurm.wait(lambda: {*slurm.states(job).values()} == {"COMPLETED"}, 180)
    record = read(postgres_url)
    assert record.counts == {"open": 0, "running": 0, "done": 4}
    assert {trial.state for trial in record.trials} == {"COMPLETE", "PRUNED"}
    assert len(record.trials) == 4
    assert any("resumed_from_step" in trial.telemetry for trial in record.trials)
    for trial in record.trials:
        steps = [row.step for row in trial.evaluations]
        assert steps == sorted(set(steps)), "no repeated evaluation"
        if (resumed_at := trial.attributes.get("resumed_at")) and trial.outcome == "complete":
            rungs = [*trial.attributes["rungs"]]
            assert trial.telemetry["resumed_from_step"] >= steps[rungs.index(str(resumed_at))]
