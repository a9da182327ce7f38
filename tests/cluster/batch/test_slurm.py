import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
from support.command_line import hpo_command, ok, refused
from support.postgres import PASSWORD
from support.slurm import SlurmCluster
from support.tiny import write_study

from hpo.cluster.batch.slurm import WorkerArray, requeue_this_job, seconds_of
from hpo.study.running.stopping import Stop
from hpo.study.store.storage import open_storage

URL = "postgresql://me:secret@host/db"
WORKER = ("-m", "hpo", "worker", "tiny", "--workers-per-device", "1")


def options_of(script: str) -> dict[str, str]:
    """Return the #SBATCH options of a script."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))


def dry_run(folder: Path, *options: str, storage: str = URL, **changes: Any) -> str:
    write_study(folder, **changes)
    given = ("tiny.yaml", "--slurm", "--dry-run", "--storage", storage)
    return ok(hpo_command(folder, "submit", *given, *options)).out


def test_script_has_options_of_sbatch(tmp_path: Path) -> None:
    given = {"partition": "gpu", "account": "lab", "time": "4:00:00", "gpus-per-node": "a100:4"}
    given |= {"cpus-per-task": "16", "mem": "60G"}
    options = [f"--{name}={value}" for name, value in given.items()]
    options += ["--workers=10", "--sbatch=signal=B:USR1@300", "--sbatch=qos=long", "--sbatch", "exclusive"]
    script = dry_run(tmp_path, *options)
    given |= {"qos": "long", "exclusive": "", "array": "0-2", "signal": "B:USR1@300"}
    defaults = {"chdir": str(tmp_path), "nodes": "1", "requeue": "", "open-mode": "append"}
    assert options_of(script).items() >= {**given, **defaults}.items()
    assert options_of(script).keys() - given.keys() - defaults.keys() == {"job-name", "output"}
    assert shlex.split(script.rstrip().splitlines()[-1])[4:] == [sys.executable, *WORKER]
    assert "secret" not in script
    assert f"export HPO_STORAGE=@{tmp_path}/runs/tiny/slurm-" in script
    assert not list(tmp_path.glob("runs/tiny/*")), "a dry run writes nothing"


def test_no_requeue_option(monkeypatch: pytest.MonkeyPatch) -> None:
    script = WorkerArray("tiny", URL, Path("/x/y/z"), sbatch={"no-requeue": True}).script()
    assert "no-requeue" in options_of(script)
    assert "requeue" not in options_of(script)
    [(name, value)] = re.findall(r"^export (HPO_NO_\w+)=(.*)$", script, re.MULTILINE)
    requeued: list[str] = []
    monkeypatch.setattr("hpo.cluster.batch.slurm._slurm", lambda command: requeued.append(command[-1]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    stop = Stop()
    stop.set("its time ends", signal.SIGUSR1)
    requeue_this_job("stopped", stop)
    assert requeued == ["7"]
    monkeypatch.setenv(name, value)
    requeue_this_job("stopped", stop)
    assert requeued == ["7"]


def test_jobs_may_use_paths_of_study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_ALLOW", "s3://ours")
    file = tmp_path / "url"
    file.write_text(URL)
    file.chmod(0o600)
    script = dry_run(tmp_path, checkpoint={"location": "/scratch/my files"}, storage=f"@{file}")
    assert "export HPO_ALLOW='s3://ours:/scratch/my files'\n" in script
    assert f"export HPO_STORAGE=@{file}\n" in script


@pytest.mark.parametrize(
    ("gpus", "workers", "jobs", "per_job"),
    [(None, 3, 3, 1), ("0", 3, 3, 1), ("4", 8, 2, 4), ("4", 9, 3, 4), ("h100:2", 1, 1, 2)],
)
def test_one_worker_per_gpu(gpus: str | None, workers: int, jobs: int, per_job: int) -> None:
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
        (("--slurm", "--mount", "/data"), "--mount needs a container. Add --apptainer IMAGE"),
        (("--slurm", "--pyxis", "x", "--mount", "/a:b"), "must have no `,` or `:`, but got /a:b"),
        (("--slurm", "--setup", "none.sh"), "'none.sh': No such file or directory"),
        (("--slurm", "--time", "3"), "--time must be more than 180 s"),
        (("--slurm",), "but it is a SQLite file, which several hosts would damage. `hpo database start"),
    ],
)
def test_submit_refuses_bad_options(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    write_study(tmp_path)
    refused(hpo_command(tmp_path, "submit", "tiny.yaml", *options), message)
    assert not list(tmp_path.glob("runs/tiny/*"))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:01", 7201), ("1-1", 90000), ("1-0:30", 88200), ("2-00:00:05", 172805)]
    + [(given, None) for given in ("", "1h", "-5", "1:2:3:4", "1-2:3:4:5", "UNLIMITED")],
)
def test_seconds_of_time_limits(given: str, seconds: int | None) -> None:
    assert seconds_of(given) == seconds


def submit_held(folder: Path, url: str, num_workers: int) -> Any:
    """Submit jobs that Slurm holds."""
    write_study(folder)
    options = ("--slurm", "--workers", str(num_workers), "--sbatch", "hold", "--storage", url, "--json")
    return ok(hpo_command(folder, "submit", "tiny.yaml", *options)).json


class TestRealSlurm:
    pytestmark: ClassVar = [pytest.mark.slurm, pytest.mark.postgres]

    @pytest.mark.usefixtures("slurm")
    def test_answer_names_the_logs(self, postgres_url: str, tmp_path: Path) -> None:
        write_study(tmp_path)
        options = ["submit", "tiny.yaml", "--slurm", "--sbatch", "hold", "--storage", postgres_url]
        for more, logs in (
            ((), r"runs/tiny/slurm-\S+/\*\.log"),
            (("--sbatch", "output=my-%a.log"), "my-%a.log"),
        ):
            assert re.search(f"^Logs: +{logs}$", ok(hpo_command(tmp_path, *options, *more)).out, re.MULTILINE)

    def test_password_is_in_its_file_alone(
        self, slurm: SlurmCluster, postgres_url: str, tmp_path: Path
    ) -> None:
        answer = submit_held(tmp_path, postgres_url, 3)
        job, folder = answer["job"], tmp_path / answer["folder"]
        assert (answer["study"], answer["num_workers"]) == ("tiny", 3)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "url").read_text() == f"{postgres_url}\n"
        assert (folder / "url").stat().st_mode & 0o777 == 0o600
        shown = slurm.run(f"scontrol show -dd job {job}")
        kept = [path.read_bytes() for path in (slurm.folder / "state").rglob("*") if path.is_file()]
        kept += [(folder / "job.sh").read_bytes(), shown.encode()]
        assert any(b"HPO_STORAGE=@" in content for content in kept), "the check can fail"
        for secret in (PASSWORD, quote(PASSWORD, safe="")):
            assert not any(secret.encode() in content for content in kept)
        slurm.run("scancel --name=hpo-tiny")

    def test_end_of_study_cancels_waiting_jobs(
        self, slurm: SlurmCluster, postgres_url: str, tmp_path: Path
    ) -> None:
        """Slurm holds a job after a failed launch, so that it would stay in the queue for ever."""
        job = submit_held(tmp_path, postgres_url, 2)["job"]
        slurm.run(f"scontrol release {job}_0")
        slurm.wait(lambda: {*slurm.states(job).values()} == {"COMPLETED", "CANCELLED"}, 120)
        with open_storage(postgres_url) as storage:
            assert storage.trial_counts("tiny")["done"] == 2
