from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.command_line import ROOT, hpo_command, ok, refused
from support.postgres import PASSWORD, PostgresServer
from support.readme import CLUSTER
from support.slurm import SlurmCluster
from support.tiny import write_study

from hpo.cluster.batch.slurm import WorkerArray, requeue_this_job, seconds_of
from hpo.errors import InputError
from hpo.study.running.stopping import Stop
from hpo.study.store.process import this_job
from hpo.study.store.storage import open_storage

URL = "postgresql://me:secret@host/db"
WORKER = ("-m", "hpo", "worker", "tiny", "--workers-per-device", "1")


def options_of(script: str) -> dict[str, str]:
    """What follows #SBATCH, by its name; of options without a value an empty text."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))


def dry_run(folder: Path, *options: str, storage: str = URL, **changes: Any) -> str:
    write_study(folder, **changes)
    given = ("tiny.yaml", "--slurm", "--dry-run", "--storage", storage)
    return ok(hpo_command(folder, "submit", *given, *options)).out


def test_the_script_has_the_options_as_sbatch_names_them(tmp_path: Path) -> None:
    given = {"partition": "gpu", "account": "lab", "time": "4:00:00", "gpus-per-node": "a100:4"}
    given |= {"cpus-per-task": "16", "mem": "60G"}
    options = [f"--{name}={value}" for name, value in given.items()]
    options += ["--workers=10", "--sbatch=signal=B:USR1@300", "--sbatch=qos=long", "--sbatch", "exclusive"]
    script = dry_run(tmp_path, *options)
    found = options_of(script)
    assert found.items() >= {**given, "qos": "long", "exclusive": "", "requeue": "", "nodes": "1"}.items()
    assert found["array"] == "0-2", "ten workers are three jobs of four GPUs"
    assert found["signal"] == "B:USR1@300"
    assert found["chdir"] == str(tmp_path)
    assert shlex.split(script.rstrip().splitlines()[-1])[4:] == [sys.executable, *WORKER]


def test_what_is_not_given_is_left_to_the_cluster(tmp_path: Path) -> None:
    expected = {"array", "chdir", "job-name", "nodes", "open-mode", "output", "requeue", "signal"}
    assert options_of(dry_run(tmp_path)).keys() == expected


def test_jobs_that_are_not_to_be_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = dry_run(tmp_path, "--sbatch=no-requeue")
    assert "no-requeue" in options_of(script)
    assert "requeue" not in options_of(script)
    [(name, value)] = re.findall(r"^export (HPO_NO_\w+)=(.*)$", script, re.MULTILINE)
    asked: list[str] = []
    monkeypatch.setattr("hpo.cluster.batch.slurm._slurm", lambda command: asked.append(command[-1]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    stop = Stop()
    stop.set("its time ends", signal.SIGUSR1)
    for expected in (["7"], ["7"]):
        requeue_this_job("stopped", stop)
        assert asked == expected
        monkeypatch.setenv(name, value)


def test_a_job_asks_for_its_end_only_where_slurm_does_not_tell_it(tmp_path: Path) -> None:
    [line] = [line for line in dry_run(tmp_path).splitlines() if "squeue" in line]
    (tmp_path / "squeue").write_text("#!/bin/sh\ntouch asked\necho 2030-01-01T00:00:00\n")
    (tmp_path / "squeue").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for given, told in (("123", "123"), ("", "1893456000")):
        assert not (tmp_path / "asked").exists()
        variables = {"PATH": path, "SLURM_JOB_ID": "1", "TZ": "UTC", "SLURM_JOB_END_TIME": given}
        script = f"{line}\nprintenv SLURM_JOB_END_TIME"
        done = subprocess.run(["bash", "-c", script], env=variables, cwd=tmp_path, capture_output=True)
        assert done.stdout.decode().strip() == told
    assert (tmp_path / "asked").exists()


def test_a_dry_run_makes_nothing_and_shows_no_password(tmp_path: Path) -> None:
    script = dry_run(tmp_path)
    assert "secret" not in script
    assert re.search(rf"HPO_STORAGE=@{tmp_path}/runs/tiny/storage-\w+$", script, re.MULTILINE)
    assert not list(tmp_path.glob("runs/tiny/*"))


def test_jobs_may_use_what_the_users_study_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the study from the database."""
    monkeypatch.setenv("HPO_ALLOW", "s3://ours")
    script = dry_run(tmp_path, checkpoint={"location": "/scratch/my files"})
    assert "export HPO_ALLOW='s3://ours:/scratch/my files'\n" in script


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
        ((), "The batch system must be named: give --slurm."),
        (("--slurm", "--gpus-per-node", "many"), "--gpus-per-node must be a number or TYPE:NUMBER, but got"),
        (("--slurm", "--sbatch", "gres=gpu:4"), "but got --sbatch gres. Use --gpus-per-node."),
        (("--slurm", "--sbatch", "gpus-per-task=1"), "but got --sbatch gpus-per-task. Use --gpus-per-node."),
        (("--slurm", "--sbatch", "container-image=x"), "must be given by --apptainer or --pyxis, so that"),
        (("--slurm", "--apptainer", "x", "--pyxis", "y"), "one container, but got --apptainer and --pyxis."),
        (
            ("--slurm", "--mount", "/data"),
            "--mount needs a container. Add --apptainer IMAGE or --pyxis IMAGE.",
        ),
        (("--slurm", "--pyxis", "x", "--mount", "/a:b"), "must have no `,` or `:` in its path, but got /a:b"),
        (
            ("--slurm", "--setup", "none.sh"),
            "Invalid value for '--setup': 'none.sh': No such file or directory",
        ),
        (("--slurm", "--time", "3"), "--time must be more than a minute longer than the 120 s that a job is"),
        (("--slurm",), "but it is a SQLite file, which several hosts would damage. `hpo database start"),
    ],
)
def test_bad_input(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    write_study(tmp_path)
    refused(hpo_command(tmp_path, "submit", "tiny.yaml", *options), message)
    assert not list(tmp_path.glob("runs/tiny/*"))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:01", 7201),
        ("1-1", 90000),
        ("1-0:30", 88200),
        ("2-00:00:05", 172805),
        ("0", 0),
        *((given, None) for given in ("", "1h", "-5", "1:2:3:4", "1-", "1-2:3:4:5", "1:", "UNLIMITED")),
    ],
)
def test_time_limits(given: str, seconds: int | None) -> None:
    assert seconds_of(given) == seconds


def test_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"there is no `sbatch`\. Run this on a login node"):
        WorkerArray("tiny", URL, tmp_path / "x").submit()


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "slurm:here:7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "slurm:here:7_0"),
    ],
)
def test_this_job(environment: dict[str, str], job: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert this_job() == job


@pytest.mark.slurm
@pytest.mark.postgres
def test_nothing_of_slurms_has_the_password(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    write_study(tmp_path)
    given = ("tiny.yaml", "--slurm", "--workers", "3", "--sbatch", "hold", "--storage", postgres_url)
    answer = ok(hpo_command(tmp_path, "submit", *given, "--json")).json
    job, folder = answer["job"], tmp_path / answer["folder"]
    assert (answer["study"], answer["num_workers"]) == ("tiny", 3)

    assert folder.stat().st_mode & 0o777 == 0o700
    [secret_file] = folder.parent.glob("storage-*")
    assert secret_file.read_text() == f"{postgres_url}\n"
    assert secret_file.stat().st_mode & 0o777 == 0o600
    shown = slurm.run(f"scontrol show -dd job {job}")
    kept = [path.read_bytes() for path in (slurm.folder / "state").rglob("*") if path.is_file()]
    kept += [(folder / "job.sh").read_bytes(), shown.encode()]
    assert any(b"HPO_STORAGE=@" in content for content in kept), "the check can fail"
    for secret in (PASSWORD, quote(PASSWORD, safe="")):
        assert not any(secret.encode() in content for content in kept)

    slurm.run("scancel --name=hpo-tiny")


@pytest.mark.slurm
@pytest.mark.postgres
def test_a_job_that_waits_is_cancelled_when_the_study_is_done(
    slurm: SlurmCluster, postgres_url: str, tmp_path: Path
) -> None:
    """Slurm holds a job whose launch failed, as it does under load: it would stay in the queue for ever."""
    write_study(tmp_path)
    given = ("tiny.yaml", "--slurm", "--workers", "2", "--sbatch", "hold", "--storage", postgres_url)
    job = ok(hpo_command(tmp_path, "submit", *given, "--json")).json["job"]
    slurm.run(f"scontrol release {job}_0")
    slurm.wait(lambda: {*slurm.states(job).values()} == {"COMPLETED", "CANCELLED"}, 120)
    with open_storage(postgres_url) as storage:
        assert storage.trial_counts("tiny")["done"] == 2


@pytest.mark.slurm
@pytest.mark.postgres
def test_a_study_of_the_database_goes_on_as_it_is(
    slurm: SlurmCluster, postgres_url: str, tmp_path: Path
) -> None:
    path = write_study(tmp_path)
    given = ("--slurm", "--sbatch", "hold", "--storage", postgres_url)
    ok(hpo_command(tmp_path, "init", "tiny.yaml", "--n-trials", "7", "--storage", postgres_url))
    ok(hpo_command(tmp_path, "submit", "tiny.yaml", *given))
    path.unlink()
    ok(hpo_command(tmp_path, "submit", "tiny", *given))
    with open_storage(postgres_url) as storage:
        assert storage.trial_counts("tiny")["open"] == 7
    ok(hpo_command(tmp_path, "submit", "tiny", "--n-trials", "9", *given))
    with open_storage(postgres_url) as storage:
        assert storage.trial_counts("tiny")["open"] == 9
    assert len([*tmp_path.glob("runs/tiny/storage-*")]) == 1, "one file with the URL, not one a submission"
    slurm.run("scancel --name=hpo-tiny")


@pytest.mark.slurm
@pytest.mark.postgres
def test_slurm_refuses_the_options(slurm: SlurmCluster, postgres_url: str, tmp_path: Path) -> None:
    del slurm
    write_study(tmp_path)
    given = ("tiny.yaml", "--slurm", "--partition", "nowhere", "--storage", postgres_url)
    message = "`sbatch` must succeed, but it says: sbatch: error: invalid partition"
    assert "Traceback" not in refused(hpo_command(tmp_path, "submit", *given), message).err


def commands_of(text: str) -> list[list[str]]:
    """The words of the lines in the code blocks of a text, without comments."""
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


@pytest.mark.slurm
@pytest.mark.postgres
def test_the_commands_of_the_readme(slurm: SlurmCluster, postgres_server: PostgresServer) -> None:
    """As they stand there, with a smaller study and the memory of the nodes of the test."""
    del postgres_server
    folder = slurm.folder / "work"
    (folder / "studies").mkdir(parents=True)
    write_study(folder / "studies").rename(folder / "studies" / "smoke.yaml")
    text = (folder / "studies" / "smoke.yaml").read_text().replace("name: tiny", "name: smoke")
    (folder / "studies" / "smoke.yaml").write_text(text)
    section = CLUSTER.read_text().split("## On a cluster")[1].split("\n## ")[0]
    replaced = {"PARTITION": "low", "8G": "1500M"}
    typed: list[str] = []
    storage: tuple[str, ...] = ()
    for words in commands_of(section):
        match [replaced.get(word, word) for word in words]:
            case ["export", setting]:
                storage = ("--storage", setting.removeprefix("HPO_STORAGE="))
            case ["sbatch", *options, command]:
                command = command.replace(".venv/bin/hpo", f"env PYTHONPATH={ROOT} {sys.executable} -m hpo")
                slurm.run("sbatch", f"--chdir={folder}", *options, command)
            case [".venv/bin/hpo", "database", "status"]:
                slurm.wait(lambda: hpo_command(folder, "database", "status").exit_code == 0)
            case [".venv/bin/hpo", "submit", *options]:
                ok(hpo_command(folder, "submit", *options))
            case [".venv/bin/hpo", *command]:
                ok(hpo_command(folder, *command, *storage))
                typed.append(command[0])
            case ["squeue", *_]:
                assert "hpo-database" in slurm.run(" ".join(words), "--format=%j")
                slurm.wait(lambda: not slurm.run("squeue --noheader --name=hpo-smoke"), 120)
            case ["scancel", *_]:
                slurm.run(" ".join(words))
                slurm.wait(lambda: not slurm.run("squeue --noheader"))
            case [*other]:
                assert other[:1] in ([], ["tail"])
    assert typed == ["status", "report"]
    assert (folder / "runs/smoke/report/report.html").exists()
    log = (folder / "runs/postgres/data/server.log").read_text()
    assert "database system is shut down" in log, "Slurm's SIGTERM ends it in order"
