"""On a real Slurm, what befalls a job costs its trial no more than what follows its last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import ROOT, hpo_command, ok, saved_steps
from support.container import PYTHON, make_image, make_programs, path_with, why_no_container
from support.own_code_studies import write
from support.postgres import PostgresServer
from support.slurm import SlurmCluster
from support.tiny import write_long_study

from hpo.cluster.postgres.postgres_server import write_secret
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.store.storage import open_storage

pytestmark = [pytest.mark.slurm, pytest.mark.postgres]


def submit(folder: Path, url: str, *options: str, seconds: float = 12) -> str:
    """Submit one worker to the partition `low` with a study of one trial; return the job's number.

    The trial takes so many seconds, on a fast machine too: what is to befall it takes Slurm some seconds.
    """
    write_long_study(folder, 0.1, n_trials=1, per_trial=4, max_seconds=seconds)
    submitted = hpo_command(folder, "submit", "tiny.yaml", "--slurm", "--storage", url, "--json", *options)
    return str(ok(submitted).json["job"])


def read(url: str) -> StudyRecord:
    with open_storage(url) as storage:
        return read_study(storage, "tiny")


def check_went_on(slurm: SlurmCluster, url: str, job: str) -> None:
    """The job ends by itself, and its one trial went on from a checkpoint after a restart."""
    slurm.wait(lambda: {*slurm.states(job).values()} == {"COMPLETED"}, 120)
    record = read(url)
    assert record.counts == {"open": 0, "running": 0, "done": 1}
    [trial] = record.trials
    assert (trial.number, trial.outcome) == (0, "complete")
    assert 0 < trial.telemetry["resumed_from_step"] <= trial.telemetry["num_steps"]
    assert len(trial.evaluations) == 4
    assert {worker.job for worker in record.workers} >= {f"slurm:hpo:{task}" for task in slurm.states(job)}


def node_of(slurm: SlurmCluster, job: str) -> str:
    return slurm.run(f"squeue --job={job} --noheader --format=%N").strip()


def preempt(slurm: SlurmCluster, job: str) -> None:
    del job
    slurm.run("sbatch --partition=high --exclusive --nodes=2 --output=/dev/null --wrap", "sleep 1")


def come_to_the_time_limit(slurm: SlurmCluster, job: str) -> None:
    slurm.run(f"scontrol update jobid={job}_0 EndTime=now+50")  # it looks every 30 s who is to be warned


def kill_the_node(slurm: SlurmCluster, job: str) -> None:
    slurm.kill_node(node_of(slurm, job))


def check_requeued(
    befall: Callable[[SlurmCluster, str], None], slurm: SlurmCluster, job: str, folder: Path
) -> None:
    """Let something happen to the job once its trial is further on than before; Slurm requeues it."""
    before = saved_steps(folder)[-1:]
    slurm.wait(
        lambda: slurm.states(job) == {f"{job}_0": "RUNNING"} and saved_steps(folder)[-1:] > before, 120
    )
    befall(slurm, job)
    slurm.wait(lambda: slurm.states(job) != {f"{job}_0": "RUNNING"})
    slurm.start_missing_nodes()


@pytest.mark.slow
def test_a_job_that_is_requeued_again_and_again(
    slurm: SlurmCluster, postgres_url: str, tmp_path: Path
) -> None:
    """By Slurm when it is preempted and when its node dies."""
    job = submit(tmp_path, postgres_url, seconds=14)
    for befall in (preempt, kill_the_node):
        check_requeued(befall, slurm, job, tmp_path)
    check_went_on(slurm, postgres_url, job)


def test_an_array_that_is_preempted_loses_no_trial_that_has_paused(
    slurm: SlurmCluster, postgres_url: str, tmp_path: Path
) -> None:
    """Two workers of four trials, of which two go on from the first rung and one to the end."""
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
        assert steps == sorted(set(steps)), "no evaluation twice"
        if (resumed_at := trial.attributes.get("resumed_at")) and trial.outcome == "complete":
            rungs = [*trial.attributes["rungs"]]
            assert trial.telemetry["resumed_from_step"] >= steps[rungs.index(str(resumed_at))]


@pytest.mark.slow
def test_a_job_that_comes_to_its_time_limit(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    job = submit(tmp_path, postgres_url, "--sbatch", "signal=B:USR1@50", seconds=45)
    check_requeued(come_to_the_time_limit, slurm, job, tmp_path)
    check_went_on(slurm, postgres_url, job)


def test_a_job_that_is_cancelled(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    """SIGTERM: the worker leaves in time and is not requeued; the next job goes on with its trial."""
    job = submit(tmp_path, postgres_url, seconds=6)
    slurm.wait(lambda: bool(saved_steps(tmp_path)))
    slurm.run(f"scancel {job}")
    slurm.wait(lambda: slurm.states(job) == {f"{job}_0": "CANCELLED"})
    record = read(postgres_url)
    assert record.counts == {"open": 1, "running": 0, "done": 0}
    assert [trial.outcome for trial in record.trials] == ["preempted"]
    check_went_on(slurm, postgres_url, submit(tmp_path, postgres_url, seconds=6))


@pytest.mark.usefixtures("forgotten")
def test_code_of_ones_own_goes_with_the_job(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    """As the study file does: what becomes of either after the submission changes nothing."""
    write(tmp_path, n_trials=1)
    options = ("--slurm", "--storage", postgres_url, "--json")
    job = str(ok(hpo_command(tmp_path, "submit", "tiny.yaml", *options)).json["job"])
    (tmp_path / "own_kind.py").write_text("raise RuntimeError\n")
    slurm.wait(lambda: {*slurm.states(job).values()} == {"COMPLETED"}, 120)
    [trial] = read(postgres_url).trials
    assert trial.outcome == "complete", trial.reason


def test_a_job_that_is_warned_while_the_database_is_away(
    slurm: SlurmCluster, own_server: PostgresServer, tmp_path: Path
) -> None:
    """It is requeued. The next job waits for the database and goes on with the trial."""
    write_long_study(tmp_path, 0.1, n_trials=1, per_trial=4, max_seconds=6)
    script = tmp_path / "job.sh"
    with own_server.database() as url:
        ok(hpo_command(tmp_path, "init", "tiny.yaml", "--storage", url))
        write_secret(tmp_path / "url", url)
        script.write_text(
            f"#!/bin/sh\nexport HPO_STORAGE=@{tmp_path}/url PYTHONPATH={ROOT}\n"
            f"exec {sys.executable} -m hpo worker tiny\n"
        )
        options = f"--parsable --requeue --chdir={tmp_path} --output={tmp_path}/%j.log"
        job = slurm.run(f"sbatch {options}", str(script)).strip()
        slurm.wait(lambda: bool(saved_steps(tmp_path)))
        own_server.stop(immediate=True)
        try:
            slurm.run(f"scancel --signal=USR1 --batch {job}")
            slurm.wait(lambda: slurm.run(f"squeue --job={job} --noheader --format=%r").strip() == "BeginTime")
            slurm.wait(lambda: slurm.states(job) == {job: "RUNNING"})
        finally:
            own_server.start()
        check_went_on(slurm, url, job)


@pytest.mark.slow
def test_a_node_that_slurm_loses_with_its_job_alive(
    slurm: SlurmCluster, postgres_url: str, tmp_path: Path
) -> None:
    """The job is started again elsewhere, and two workers live: one of them has the trial."""
    job = submit(tmp_path, postgres_url, seconds=80)
    slurm.wait(lambda: bool(saved_steps(tmp_path)))
    lost = node_of(slurm, job)
    slurm.kill_slurmd(lost)
    slurm.wait(lambda: sum(worker.alive for worker in read(postgres_url).workers) == 2, 90)
    assert node_of(slurm, job) != lost
    slurm.wait(lambda: slurm.states(job) == {f"{job}_0": "COMPLETED"}, 120)
    slurm.start_missing_nodes()
    record = read(postgres_url)
    assert record.counts == {"open": 0, "running": 0, "done": 1}
    [trial] = record.trials
    assert (trial.outcome, len(trial.evaluations)) == ("complete", 4)
    assert "resumed_from_step" not in trial.telemetry, "the first worker kept it"


@pytest.mark.skipif(bool(why_no_container()), reason=why_no_container() or "it can")
@pytest.mark.parametrize("runtime", ["apptainer", pytest.param("pyxis", marks=pytest.mark.slow)])
def test_a_job_in_a_container_is_requeued_and_cancelled(
    slurm: SlurmCluster,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runtime: str,
) -> None:
    """The worker has its signals, and asks Slurm for the requeue from inside."""
    make_programs(tmp_path)
    monkeypatch.setenv("PATH", path_with(tmp_path))
    (tmp_path / "setup").write_text("set -u\nexport OMP_NUM_THREADS=1\n")
    image = str(make_image(tmp_path))
    options = (f"--{runtime}", image, "--python", PYTHON, "--setup", "setup")
    job = submit(tmp_path, postgres_url, *options)
    slurm.wait(lambda: bool(saved_steps(tmp_path)) or slurm.states(job) == {f"{job}_0": "FAILED"})
    slurm.run(f"scancel --signal=USR1 --batch {job}")
    slurm.wait(lambda: slurm.run(f"squeue --job={job} --noheader --format=%r").strip() == "BeginTime")
    before = saved_steps(tmp_path)[-1:]
    slurm.wait(lambda: slurm.states(job) == {f"{job}_0": "RUNNING"} and saved_steps(tmp_path)[-1:] > before)
    slurm.run(f"scancel {job}")
    slurm.wait(lambda: slurm.states(job) == {f"{job}_0": "CANCELLED"})
    assert [trial.outcome for trial in read(postgres_url).trials] == ["preempted"]
    check_went_on(slurm, postgres_url, submit(tmp_path, postgres_url, *options))
