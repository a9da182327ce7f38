"""The script of a job, run by bash as a node would: set-up script, interpreter, container."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.command_line import hpo_command, ok
from support.container import make_image, make_programs, path_with, why_no_container
from support.tiny import write_study

needs_root = pytest.mark.skipif(bool(why_no_container()), reason=why_no_container() or "it can")


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def start(folder: Path, *options: str, query: str = "", **changes: object) -> subprocess.Popen[str]:
    """Start the script that would be submitted; the file with the URL and the set-up script are there."""
    write_study(folder, **changes)
    url = f"postgresql://me:secret@host/db{query}"
    given = ("tiny.yaml", "--slurm", "--dry-run", "--json", "--storage", url, *options)
    script: str = ok(hpo_command(folder, "submit", *given)).json["script"]
    made = folder / "runs" / "tiny"
    made.mkdir(parents=True, exist_ok=True)
    if (folder / "setup").exists():
        [line] = [line for line in script.splitlines() if line.endswith("/setup.sh")]
        Path(line.split()[-1]).parent.mkdir(parents=True)
        Path(line.split()[-1]).write_text((folder / "setup").read_text())
    [job_folder] = {line.partition("=")[2] for line in script.splitlines() if "--output=" in line}
    Path(job_folder).parent.mkdir(parents=True, exist_ok=True)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1", "SLURMD_NODENAME": "n1"}
    return subprocess.Popen(
        ["bash", "-c", script],
        env={**os.environ, **slurm, "PATH": path_with(folder)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("container", [(), ("--apptainer", "image")], ids=["none", "apptainer"])
@pytest.mark.parametrize(
    "text",
    ["false\ntrue", "exit 3", "exit 0", "module load none\ntrue", "return 4", "if true", "false | cat"],
)
def test_a_failing_setup_script_starts_no_worker(
    tmp_path: Path, text: str, container: tuple[str, ...]
) -> None:
    python = program(tmp_path / "python", "echo started")
    (tmp_path / "setup").write_text(f"set -o pipefail\n{text}\n")
    job = start(tmp_path, "--setup", "setup", "--python", str(python), *container)
    out, err = job.communicate()
    assert (job.returncode, out) == (1, "")
    assert err.count("hpo: the set-up script must succeed, but it ended with exit code ") == 1
    assert err.endswith("No worker starts.\n")


def test_the_worker_has_the_environment_of_the_setup_script(tmp_path: Path) -> None:
    program(tmp_path / "own-python", 'echo "$MARK $PWD $*"')
    (tmp_path / "setup").write_text("set -euo pipefail\nexport MARK=7\ncd /\n")
    job = start(tmp_path, "--setup", "setup", "--python", "own-python")
    assert job.communicate() == (f"7 {tmp_path} -m hpo worker tiny --workers-per-device 1\n", "")
    assert job.returncode == 0


@pytest.mark.parametrize("kind", ["absent", "not executable", "folder", "not on the path"])
@pytest.mark.parametrize(
    "container", [False, pytest.param(True, marks=needs_root)], ids=["node", "container"]
)
def test_a_python_that_the_node_lacks(tmp_path: Path, kind: str, container: bool) -> None:
    given = "no-such-python" if kind == "not on the path" else str(tmp_path / "python")
    if kind == "not executable":
        Path(given).write_text("")
    if kind == "folder":
        Path(given).mkdir()
    make_programs(tmp_path)
    options = ("--apptainer", str(make_image(tmp_path))) if container else ()
    job = start(tmp_path, "--python", given, *options)
    out, err = job.communicate()
    where = " in the container" if container else ""
    expected = f"hpo: --python must name a program{where} on n1, not `{given}`, which is none.\n"
    assert (job.returncode, out, err) == (2, "", expected)


@needs_root
@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_the_container_has_what_the_worker_needs_and_no_more(
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
    (work / "srun").write_text(
        (work / "srun").read_text().replace("exec /usr/bin/srun", "exec srun-of-slurm")
    )
    look = program(tmp_path / "look", f'pwd; ls "{outside}"; ls -d runs/tiny')
    image = make_image(tmp_path, look=look)
    job = start(
        work,
        *(f"--{runtime}", str(image), "--python", "/opt/look", "--mount", str(outside / "more")),
        query=f"?host={outside}/socket",
        checkpoint={"location": str(outside / "location")},
    )
    out, err = job.communicate()
    assert err == ""
    expected = [str(work), *sorted(set(names) - {"private"}), "runs/tiny"]
    assert out.splitlines() == expected


@needs_root
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 11), (signal.SIGTERM, 12)])
def test_signals_and_requests_go_through_a_container(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The shell outside runs what the worker asks of Slurm, after the worker has ended."""
    make_programs(tmp_path)
    program(tmp_path / "scontrol", 'echo "asked: $*"')
    end = 'echo "scontrol requeue 7" > "$HPO_SLURM_REQUESTS"; echo ended; exit'
    text = f"trap '{end} 11' USR1; trap '{end} 12' TERM; echo up; while :; do sleep 0.05; done"
    # A shell cannot listen to a signal that it was started without; Python can.
    worker = program(tmp_path / "worker", "")
    worker.write_text(f"#!/usr/bin/env -S --default-signal=USR1 bash\n{text}\n")
    image = make_image(tmp_path, worker=worker)
    job = start(tmp_path, "--apptainer", str(image), "--python", "/opt/worker")
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    job.send_signal(number)
    out, err = job.communicate()
    assert (out, err, job.returncode) == ("ended\nasked: requeue 7\n", "", code)
