"""Workers as Slurm jobs: an array of batch jobs, each with one `hpo worker` on one node.

The script replaces its shell by the worker, because Slurm sends the warning (`--signal=B:...`) only to the
process of the script. A container has no Slurm commands, so there the shell stays outside, forwards the
signals, and afterwards runs the worker's request. A container sees only mounted folders.

Slurm requeues a job after a preemption or a node failure, but not at its time limit: then the worker asks for
the requeue. The worker that sees the end of the study cancels the waiting jobs of its array. A job reads the
database's URL, which may contain a password, from a file that only its owner may read.
"""

import logging
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hpo.cluster.postgres.postgres_server import write_secret
from hpo.code import Code
from hpo.config.allowed import ALLOW, DATA_DIR
from hpo.errors import HpoError, InputError, RunError
from hpo.study.running.stopping import SLURM_END, WORKERS_ON_DEVICE, Stop
from hpo.study.store.database import parse_url, storage_url
from hpo.study.store.process import this_job

REQUESTS = "HPO_SLURM_REQUESTS"
"""Environment variable: file for the Slurm commands of a worker in a container."""

# Python starts with USR1 ignored: until it installs its handler, the signal would kill it.
_START = (
    'trap "" USR1; python=$(command -v "$0") && [ -f "$python" ] && [ -x "$python" ] || '
    '{ echo "hpo: --python must name a program%s on $SLURMD_NODENAME, but \\`$0\\` is no program." '
    '>&2; exit 2; }; exec "$0" "$@"'
)
_CHECKED = (
    'trap \'echo "hpo: the set-up script must succeed, but it ended with exit code $?. No worker starts." '
    ">&2; exit 1' EXIT"
)
_FORWARD_SIGNALS = """\
trap 'kill -USR1 "$worker"' USR1
trap 'kill -TERM "$worker"' TERM
while wait "$worker"; kill -0 "$worker" 2>/dev/null; do :; done
wait "$worker"
code=$?
[ ! -f "$HPO_SLURM_REQUESTS" ] || sh "$HPO_SLURM_REQUESTS"
exit $code"""

COMMAND_SECONDS = 60  # time limit of a Slurm command; without its server, a command retries for minutes
# Slurm before 23.02 does not set the variable. `date` fails for a job without an end.
_END_OF_JOB = (
    f'[ -n "${SLURM_END}" ] || {{ end=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%e) && '
    f'[ -n "$end" ] && export {SLURM_END}="$(date +%s --date="$end" 2>/dev/null)"; }}'
)
SIGNAL_LEAD = 120
"""Seconds between the warning and the time limit of a job; `--sbatch signal=B:USR1@S` changes it."""
_NO_REQUEUE = "no-requeue"
_NO_REQUEUE_SET = "HPO_NO_REQUEUE"  # set in jobs without a requeue
_ARRAY = "HPO_SLURM_ARRAY"
"""The job's array, if all its workers are in one study. Other scripts may mix studies in an array."""
_OTHER_GPU_OPTIONS = ("gpus", "gpus-per-task", "gpus-per-socket", "G")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """The part of a job script without a study."""

    setup: bytes | None = None  # text of a bash script to source first
    python: str | None = None  # Python interpreter; None: this process's own, or `python3` of the container
    apptainer: str | None = None  # container image for `apptainer exec`
    pyxis: str | None = None  # container image for `srun --container-image`
    mount: Sequence[str] = ()  # additional files and folders for the container

    def __post_init__(self) -> None:
        if self.apptainer and self.pyxis:
            raise InputError("A job runs in one container, but got --apptainer and --pyxis. Leave one out.")
        if self.mount and not (self.apptainer or self.pyxis):
            raise InputError("--mount needs a container. Add --apptainer IMAGE or --pyxis IMAGE.")

    def lines(self, worker: Sequence[str], folder: Path, paths: Iterable[Path]) -> list[str]:
        """Return the lines of a bash script that end in the `worker`, which reads or writes `paths`."""
        lines = []
        if self.setup is not None:
            lines += [_CHECKED, f"hpo_folder=$PWD; set -e; . {shlex.quote(str(folder / 'setup.sh'))}"]
            lines += ['set +euo pipefail; trap - EXIT; cd "$hpo_folder"']
        if not (self.apptainer or self.pyxis):
            start = ["sh", "-c", _START % "", self.python or sys.executable, *worker]
            return [*lines, f"exec {shlex.join(start)}"]
        start = ["sh", "-c", _START % " in the container", self.python or "python3", *worker]
        return [
            *lines,
            f'export {REQUESTS}={shlex.quote(str(folder))}/requests-"$SLURM_JOB_ID"; rm -f "${REQUESTS}"',
            f"(exec {self._container(paths)} {shlex.join(start)}) & worker=$!",
            _FORWARD_SIGNALS,
        ]

    def _container(self, paths: Iterable[Path]) -> str:
        mounts = _outermost([*map(_existing, paths), *(Path(path).absolute() for path in self.mount)])
        if self.apptainer:
            bound = [argument for path in mounts for argument in ("--bind", path)]
            return f'apptainer exec --nv {shlex.join(bound)} --pwd "$PWD" {shlex.quote(self.apptainer)}'
        bound = [f"--container-image={self.pyxis}"]
        bound += ["--container-mounts=" + ",".join(f"{path}:{path}" for path in mounts)]
        # Since Slurm 22.05 a step must request the cores of its job again.
        cores = '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
        return f'srun --ntasks=1 {cores} {shlex.join(bound)} --container-workdir="$PWD"'


def _existing(path: Path) -> Path:
    return path if os.access(path, os.F_OK) else _existing(path.parent)


def _outermost(paths: Sequence[Path]) -> list[str]:
    unique = dict.fromkeys(path for path in paths if path != Path("/"))
    if wrong := [path for path in unique if set(str(path)) & {",", ":"}]:
        raise InputError(f"The path of a mounted folder must have no `,` or `:`, but got {wrong[0]}.")
    return [str(path) for path in unique if not unique.keys() & {*path.parents}]


@dataclass(frozen=True)
class WorkerArray:
    """An array of jobs with workers of one study."""

    study: str
    storage: str  # URL of the database, or `@FILE` for a file with the URL
    folder: Path  # folder for the script, the logs and the URL, on a file system of all nodes
    num_workers: int = 1  # lower bound: every job has one worker for each of its GPUs
    sbatch: Mapping[str, str | bool] = field(default_factory=dict)
    """Additional sbatch options without dashes; True for an option without a value."""
    trust_remote_code: bool = False
    code: Sequence[Code] = ()  # code of the study; the jobs get a copy of each file
    allow: str | None = None  # HPO_ALLOW of the jobs; None: sbatch passes on the current value
    launch: Launch = field(default_factory=Launch)

    @property
    def workers_per_job(self) -> int:
        others = [name for name in _OTHER_GPU_OPTIONS if name in self.sbatch]
        if others or "gpu" in str(self.sbatch.get("gres", "")):
            raise InputError(
                "The GPUs of a job must be given by --gpus-per-node, so that each has a worker, but got "
                f"--sbatch {(others or ['gres'])[0]}. Use --gpus-per-node."
            )
        given = str(self.sbatch.get("gpus-per-node", 0))
        count = given.rpartition(":")[2]  # also `a100:4`
        if not count.isdigit():
            raise InputError(f"--gpus-per-node must be a number or TYPE:NUMBER, but got `{given}`.")
        return max(1, int(count))

    @property
    def num_jobs(self) -> int:
        return math.ceil(self.num_workers / self.workers_per_job)

    @property
    def storage_file(self) -> Path:
        """File from which the jobs read the database's URL."""
        given = self.storage.removeprefix("@")
        return Path(given).absolute() if given != self.storage else self.folder.absolute() / "url"

    def check_time(self) -> None:
        """Raise InputError if a job would be warned and requeued before it does anything."""
        limit = seconds_of(str(self.sbatch.get("time", "")))
        if limit is not None and limit <= SIGNAL_LEAD + 60:  # Slurm may warn a minute early
            raise InputError(
                f"--time must be more than {SIGNAL_LEAD + 60} s, because a job is warned {SIGNAL_LEAD} s "
                f"before its end, but got `{self.sbatch['time']}`."
            )

    def _copy_of(self, code: Code) -> Path:
        return self.folder.absolute() / code.name

    def _paths(self) -> list[Path]:
        url = parse_url(storage_url(self.storage))
        named = [*(self.allow or "").split(os.pathsep)]
        named += [str(value) for value in url.query.values()]  # a socket, certificates
        named += [os.environ.get(name, "") for name in (DATA_DIR, "HF_HOME", "HF_HUB_CACHE")]
        runs = self.folder.absolute().parents[1].resolve()  # may be a link to a larger disk
        named += [str(self.sbatch.get("chdir", Path.cwd())), str(runs), str(self.storage_file)]
        return [Path(path) for path in named if path.startswith("/")]

    def script(self) -> str:
        if container := [name for name in self.sbatch if name.startswith("container")]:
            raise InputError(
                "The container of a job must be given by --apptainer or --pyxis, so that signals reach its "
                f"worker, but got --sbatch {container[0]}."
            )
        worker = ["-m", "hpo", "worker", self.study, "--workers-per-device", "1"]
        worker += ["--trust-remote-code"] if self.trust_remote_code else []
        for code in self.code:
            worker += ["--trust-code", str(self._copy_of(code)) if code.is_file else code.location]
        options: dict[str, Any] = {
            "job-name": f"hpo-{re.sub(r'[^A-Za-z0-9_.-]', '_', self.study)}",
            "nodes": 1,
            "open-mode": "append",
            "chdir": Path.cwd(),
            "array": f"0-{self.num_jobs - 1}",
            "output": self.folder.absolute() / "%A_%a.log",
            "signal": f"B:USR1@{SIGNAL_LEAD}",
            **({} if _NO_REQUEUE in self.sbatch else {"requeue": True}),
            **self.sbatch,
        }
        lines = [
            "#!/bin/bash",
            *(
                f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
                for name, value in options.items()
            ),
            f"export HPO_STORAGE={shlex.quote(f'@{self.storage_file}')}",
            *([f"export {ALLOW}={shlex.quote(self.allow)}"] if self.allow else []),
            *([f"export {_NO_REQUEUE_SET}=1"] if _NO_REQUEUE in self.sbatch else []),
            f'export {_ARRAY}="$SLURM_ARRAY_JOB_ID"',
            _END_OF_JOB,
            "trap '' USR1  # until the worker handles it: it would kill Python at its start",
            *self.launch.lines(worker, self.folder.absolute(), self._paths()),
        ]
        return "\n".join([*lines, ""])

    def submit(self) -> str:
        """Submit the array and return its number. Raises InputError without Slurm, or if it refuses an
        option.
        """
        self.folder.mkdir(parents=True, mode=0o700)
        if not self.storage.startswith("@"):
            write_secret(self.storage_file, self.storage)
        for code in self.code:
            if code.is_file:
                self._copy_of(code).write_bytes(code.files[code.location])
        if self.launch.setup is not None:
            (self.folder / "setup.sh").write_bytes(self.launch.setup)
        script = self.folder / "job.sh"
        script.write_text(self.script())
        # sbatch passes its own environment on to the job.
        environment = {name: value for name, value in os.environ.items() if name != "HPO_STORAGE"}
        answer = _slurm(["sbatch", "--parsable", str(script)], environment)
        return answer.strip().partition(";")[0]  # with several clusters: `NUMBER;CLUSTER`


def seconds_of(limit: str) -> int | None:
    """Return the seconds of a time limit of sbatch, such as M:S or D-H:M; None for any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def job_folder(runs: Path, study: str) -> Path:
    return runs / study / f"slurm-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}-{os.getpid()}"


def requeue_this_job(ended: str, stop: Stop) -> None:
    """Ask Slurm to requeue this process's job if it `stopped` at its time limit.

    If the study is `finished`, cancel the waiting jobs of the array. Workers of a supervisor do nothing.
    """
    job = this_job()
    if job is None or WORKERS_ON_DEVICE in os.environ:
        return
    try:
        if ended == "finished" and _ARRAY in os.environ:
            _request(["scancel", "--state=PENDING", os.environ[_ARRAY]])
        elif ended == "stopped" and stop.asks_for_requeue and _NO_REQUEUE_SET not in os.environ:
            _request(["scontrol", "requeue", job.rpartition(":")[2]])
    except HpoError as error:
        _logger.warning("This job has %s, but Slurm did not get its request: %s", ended, error)


def _request(command: Sequence[str]) -> None:
    """Run a Slurm command; in a container, leave it to the shell outside."""
    if requests := os.environ.get(REQUESTS):
        Path(requests).write_text(f"{shlex.join(command)}\n")
    else:
        _slurm(command)


def _slurm(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except FileNotFoundError:
        raise InputError(
            f"Slurm's commands must be on the PATH, but there is no `{command[0]}`. "
            "Run this on a login node of the cluster."
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"`{command[0]}` has not answered for {COMMAND_SECONDS} s. Try again later.") from None
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise InputError(f"`{command[0]}` must succeed, but it says: {message}")
    return done.stdout
