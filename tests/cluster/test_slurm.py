"""The jobs of `hpo submit --slurm`: their script, their secrets, what Slurm says of them, their end."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest
from command_line import hpo_command, ok
from postgres import PASSWORD, PostgresServer
from slurm import SlurmCluster
from tiny import write_study

from hpo.cluster.jobs import add_job
from hpo.cluster.slurm import WorkerArray
from hpo.cluster.slurm_database import DatabaseJob
from hpo.errors import InputError, RunError, StorageError
from hpo.study.database import storage_url
from hpo.study.process import this_job
from hpo.study.storage import open_storage

URL = "postgresql://me:secret@host/db"


def options_of(script: str) -> dict[str, str]:
    """What follows #SBATCH, by its name; of options without a value an empty text."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))


def dry_run(folder: Path, *options: str, storage: str = URL) -> str:
    write_study(folder)
    given = ("tiny.yaml", "--slurm", "--dry-run", "--storage", storage)
    return ok(hpo_command(folder, "submit", *given, *options)).out


def test_the_script_has_the_options_as_sbatch_names_them(tmp_path: Path) -> None:
    given = {"partition": "gpu", "account": "lab", "time": "4:00:00", "gpus-per-node": "a100:4"}
    given |= {"cpus-per-task": "16", "mem": "60G"}
    options = [f"--{name}={value}" for name, value in given.items()]
    options += ["--workers=10", "--signal-lead=300", "--sbatch=qos=long", "--sbatch", "exclusive"]
    script = dry_run(tmp_path, *options)
    found = options_of(script)
    assert found.items() >= {**given, "qos": "long", "exclusive": "", "requeue": "", "nodes": "1"}.items()
    assert found["array"].partition("%")[0] == "0-2", "ten workers are three jobs of four GPUs"
    assert found["signal"] == "B:USR1@300"
    assert found["chdir"] == str(tmp_path)
    assert re.search(r"^exec \S+python\S* -m hpo worker tiny --workers-per-device 1$", script, re.MULTILINE)


def test_what_is_not_given_is_left_to_the_cluster(tmp_path: Path) -> None:
    expected = {"array", "chdir", "job-name", "nodes", "open-mode", "output", "requeue", "signal"}
    assert options_of(dry_run(tmp_path)).keys() == expected


def test_a_dry_run_makes_nothing_and_shows_no_password(tmp_path: Path) -> None:
    script = dry_run(tmp_path)
    assert "secret" not in script
    assert re.search(r"HPO_STORAGE=@(\S+)/storage$", script, re.MULTILINE)
    assert not list(tmp_path.glob("runs/tiny/*"))


def test_a_file_with_the_url_is_used_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text(URL)
    file.chmod(0o600)
    assert f"export HPO_STORAGE=@{file}\n" in dry_run(tmp_path, storage=f"@{file}")


@pytest.mark.parametrize(
    ("gpus", "workers", "jobs", "per_job"),
    [(None, 3, 3, 1), ("0", 3, 3, 1), ("1", 3, 3, 1), ("4", 8, 2, 4), ("4", 9, 3, 4), ("h100:2", 1, 1, 2)],
)
def test_one_worker_a_gpu(gpus: str | None, workers: int, jobs: int, per_job: int) -> None:
    sbatch = {} if gpus is None else {"gpus-per-node": gpus}
    array = WorkerArray("tiny", URL, Path("x"), num_workers=workers, sbatch=sbatch)
    assert (array.num_jobs, array.workers_per_job) == (jobs, per_job)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "must be told where the workers are to run: --slurm or --kubernetes."),
        (("--slurm", "--gpus-per-node", "many"), "--gpus-per-node must be a number or TYPE:NUMBER, but got"),
        (("--slurm", "--time", "3"), "--time must be more than a minute longer than --signal-lead, 120 s"),
        (("--slurm", "--time", "2:00"), "a job is warned of its end at its beginning, but got `2:00`."),
        (("--slurm", "--time", "0-0:01:30"), "but got `0-0:01:30`."),
        (("--slurm", "--time", "1-0"), "but it is a SQLite file"),
        (("--slurm", "--time", "00:04:00"), "but it is a SQLite file"),
        (("--slurm", "--time", "4"), "but it is a SQLite file"),
        (("--slurm",), "but it is a SQLite file, which several hosts would damage. --database private"),
    ],
)
def test_bad_input(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    write_study(tmp_path)
    refused = hpo_command(tmp_path, "submit", "tiny.yaml", *options)
    assert refused.exit_code == 2
    assert message in refused.err
    assert not list(tmp_path.glob("runs/tiny/*"))


def test_no_slurm_here(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"there is no `sbatch`\. Run this on a login node"):
        WorkerArray("tiny", URL, tmp_path / "x").submit()
    ok(hpo_command(write_study(tmp_path).parent, "init", "tiny.yaml", "--storage", sqlite_url))
    with open_storage(sqlite_url) as storage:
        add_job(storage, "slurm:12", "tiny", 4)
        add_job(storage, "slurm:12", "tiny", 5)
    shown = ok(hpo_command(tmp_path, "status", "tiny", "--storage", sqlite_url))
    assert re.search(r"slurm:12 +1 unknown +5 ", shown.out)
    assert "The states of jobs are unknown: Slurm's commands must be on the PATH" in shown.err


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "slurm:7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "slurm:7_0"),
    ],
)
def test_this_job(environment: dict[str, str], job: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert this_job() == job


@pytest.mark.slurm
@pytest.mark.postgres
def test_jobs_that_wait(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    """Jobs that are held: nothing of Slurm's has the password, status shows them, and they can be ended."""
    write_study(tmp_path)
    given = ("tiny.yaml", "--slurm", "--workers", "3", "--sbatch", "hold", "--storage", postgres_url)
    answer = ok(hpo_command(tmp_path, "submit", *given, "--json")).json
    job, folder = answer["job"], tmp_path / answer["folder"]
    assert (answer["study"], answer["num_workers"]) == ("tiny", 3)

    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "storage").read_text() == postgres_url
    assert (folder / "storage").stat().st_mode & 0o777 == 0o600
    shown = slurm.run(f"scontrol show -dd job {job.removeprefix('slurm:')}")
    kept = [path.read_bytes() for path in (slurm.folder / "state").rglob("*") if path.is_file()]
    kept += [(folder / "job.sh").read_bytes(), shown.encode()]
    assert any(b"HPO_STORAGE=@" in content for content in kept), "the check can fail"
    for secret in (PASSWORD, quote(PASSWORD, safe="")):
        assert not any(secret.encode() in content for content in kept)

    status = ok(hpo_command(tmp_path, "status", "tiny", "--storage", postgres_url, "--json")).json
    [found] = status["jobs"]
    assert (found["id"], found["num_workers"]) == (job, 3)
    assert (found["states"], found["reason"]) == ({"pending": 3}, "JobHeldUser")
    text = ok(hpo_command(tmp_path, "status", "tiny", "--storage", postgres_url)).out
    assert re.search(rf"{job} +3 pending \(JobHeldUser\) +3 ", text)

    cancel = ("cancel", "tiny", "--jobs", "--json", "--storage", postgres_url)
    with open_storage(postgres_url) as storage:
        add_job(storage, "slurm:999", None, 1)  # of workers for every study
    assert ok(hpo_command(tmp_path, *cancel)).json["jobs"] == [job]
    slurm.wait(lambda: {*slurm.states(job.removeprefix("slurm:")).values()} == {"CANCELLED"})
    assert ok(hpo_command(tmp_path, *cancel)).json["jobs"] == []


@pytest.mark.slurm
@pytest.mark.postgres
def test_slurm_refuses_the_options(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    del slurm
    write_study(tmp_path)
    given = ("tiny.yaml", "--slurm", "--partition", "nowhere", "--storage", postgres_url)
    refused = hpo_command(tmp_path, "submit", *given)
    assert refused.exit_code == 2
    assert "`sbatch` must succeed, but it says: sbatch: error: invalid partition" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.slurm
@pytest.mark.postgres
def test_a_database_in_a_job(slurm: SlurmCluster, postgres_server: PostgresServer) -> None:
    """It is used by whoever comes next, and ends after the last of its owner's other jobs."""
    del postgres_server  # skips where there is no PostgreSQL
    said: list[str] = []
    database = DatabaseJob(slurm.folder / "postgres", {"partition": "low"}, check_seconds=0.2)
    other = slurm.run("sbatch --parsable --hold --output=/dev/null --wrap true").strip()
    database.start(said.append)
    assert said[-1].endswith(" is running.")
    job = said[-1].split()[3].removeprefix("slurm:")
    with open_storage(storage_url(f"@{database.url_file}")) as storage:
        assert storage.engine.url.query["sslmode"] == "verify-full"

    said.clear()
    database.start(said.append)
    assert slurm.states(job) == {job: "RUNNING"}
    slurm.run(f"scancel {other}")
    slurm.wait(lambda: slurm.states(job) == {job: "COMPLETED"})
    with pytest.raises(StorageError, match="no database answers there"):
        open_storage(storage_url(f"@{database.url_file}"), create=False)


@pytest.mark.slurm
@pytest.mark.postgres
def test_a_database_job_that_fails(slurm: SlurmCluster, tmp_path: Path) -> None:
    del slurm
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "thesis.txt").touch()
    said = r"(?s)The database's job slurm:\d+ has ended.*must be empty or made by"
    with pytest.raises(RunError, match=said):
        DatabaseJob(tmp_path / "postgres").start(lambda _: None)


@pytest.mark.postgres
def test_a_database_that_others_cannot_reach(postgres_server: PostgresServer) -> None:
    with pytest.raises(InputError, match=r"must be reached by other hosts.*`hpo database stop` ends it"):
        DatabaseJob(postgres_server.folder).start(lambda _: None)


def test_one_place_for_the_study(tmp_path: Path) -> None:
    write_study(tmp_path)
    given = ("submit", "tiny.yaml", "--slurm", "--dry-run", "--partition=x", "--time=9", "--database=private")
    refused = hpo_command(tmp_path, *given, "--storage", URL)
    assert refused.exit_code == 2
    assert "but --storage or HPO_STORAGE names another" in refused.err
    again = ok(hpo_command(tmp_path, *given, "--storage", "@runs/postgres/url")).out
    database, workers = again.split("#!/bin/bash")[1:]
    assert "hpo database start --folder" in database
    assert options_of(database).items() >= {"partition": "x", "mem": "2G"}.items()
    assert "time" not in options_of(database)
    assert f"HPO_STORAGE=@{tmp_path}/runs/postgres/url\n" in workers
    assert options_of(workers)["time"] == "9"
