"""Job scripts, run by bash as on a node: set-up script, interpreter, container."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.container import make_image, make_programs, path_with, why_no_container

from hpo.cluster.batch.slurm import Launch, WorkerArray

needs_root = pytest.mark.skipif(bool(why_no_container()), reason=why_no_container() or "it can")


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def start(
    folder: Path, *, setup: str | None = None, allow: str | None = None, query: str = "", **launch: Any
) -> subprocess.Popen[str]:
    """Start the script of a job whose working folder is `folder`."""
    job = folder / "runs" / "tiny" / "job"
    job.mkdir(parents=True)
    if setup is not None:
        (job / "setup.sh").write_text(setup)
    array = WorkerArray(
        "tiny",
        f"postgresql://me:secret@host/db{query}",
        job,
        sbatch={"chdir": str(folder)},
        allow=allow,
        launch=Launch(setup=None if setup is None else setup.encode(), **launch),
    )
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1", "SLURMD_NODENAME": "n1"}
    return subprocess.Popen(
        ["bash", "-c", array.script()],
        env={**os.environ, **slurm, "PATH": path_with(folder)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("container", [{}, {"apptainer": "image"}], ids=["none", "apptainer"])
@pytest.mark.parametrize(
    "text",
    ["false\ntrue", "exit 3", "exit 0", "module load none\ntrue", "return 4", "if true", "false | cat"],
)
def test_failed_setup_script_starts_no_worker(tmp_path: Path, text: str, container: dict[str, str]) -> None:
    python = program(tmp_path / "python", "echo started")
    job = start(tmp_path, setup=f"set -o pipefail\n{text}\n", python=str(python), **container)
    out, err = job.communicate()
    assert (job.returncode, out) == (1, "")
    assert err.count("hpo: the set-up script must succeed, but it ended with exit code ") == 1
    assert err.endswith("No worker starts.\n")


def test_worker_has_environment_of_setup_script(tmp_path: Path) -> None:
    program(tmp_path / "own-python", 'echo "$MARK $PWD $*"')
    job = start(tmp_path, setup="set -euo pipefail\nexport MARK=7\ncd /\n", python="own-python")
    assert job.communicate() == (f"7 {tmp_path} -m hpo worker tiny --workers-per-device 1\n", "")
    assert job.returncode == 0


@pytest.mark.parametrize(
    "container", [False, pytest.param(True, marks=needs_root)], ids=["node", "container"]
)
def test_error_names_missing_python(tmp_path: Path, container: bool) -> None:
    make_programs(tmp_path)
    options = {"apptainer": str(make_image(tmp_path))} if container else {}
    job = start(tmp_path, python="no-such-python", **options)
    out, err = job.communicate()
    where = " in the container" if container else ""
    assert (job.returncode, out) == (2, "")
    assert f"--python must name a program{where} on n1, but `no-such-python` is no program." in err


@needs_root
@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_container_has_mounts_of_worker_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    outside, work = tmp_path / "outside", tmp_path / "work folder"
    names = ("runs", "data", "hub", "socket", "more", "location", "private")
    for folder in (work, *(outside / name for name in names)):
        folder.mkdir(parents=True)
    (work / "runs").symlink_to(outside / "runs")
    monkeypatch.setenv("HPO_DATA_DIR", str(outside / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(outside / "hub"))
    make_programs(work)
    program(work / "srun-of-slurm", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    srun = (work / "srun").read_text().replace("exec /usr/bin/srun", "exec srun-of-slurm")
    (work / "srun").write_text(srun)
    list_folders = program(tmp_path / "list", f'pwd; ls "{outside}"; ls -d runs/tiny')
    image = {runtime: str(make_image(tmp_path, list=list_folders))}
    job = start(
        work,
        allow=str(outside / "location"),
        query=f"?host={outside}/socket",
        python="/opt/list",
        mount=[str(outside / "more")],
        **image,
    )
    out, err = job.communicate()
    assert err == ""
    assert out.splitlines() == [str(work), *sorted(set(names) - {"private"}), "runs/tiny"]


@needs_root
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 11), (signal.SIGTERM, 12)])
def test_container_forwards_signals_and_slurm_commands(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    make_programs(tmp_path)
    program(tmp_path / "scontrol", 'echo "asked: $*"')
    end = 'echo "scontrol requeue 7" > "$HPO_SLURM_REQUESTS"; echo ended; exit'
    text = f"trap '{end} 11' USR1; trap '{end} 12' TERM; echo up; while :; do sleep 0.05; done"
    # A shell cannot trap a signal that was ignored at its start; Python can.
    worker = program(tmp_path / "worker", "")
    worker.write_text(f"#!/usr/bin/env -S --default-signal=USR1 bash\n{text}\n")
    image = make_image(tmp_path, worker=worker)
    job = start(tmp_path, apptainer=str(image), python="/opt/worker")
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    job.send_signal(number)
    out, err = job.communicate()
    assert (out, err, job.returncode) == ("ended\nasked: requeue 7\n", "", code)
