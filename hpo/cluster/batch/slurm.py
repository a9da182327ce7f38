"""Workers as Slurm jobs: an array of batch jobs, each of them `hpo worker` on one node.

The script replaces its shell by the worker, because Slurm sends the warning (`--signal=B:...`) to the process
of the script alone. Slurm requeues a job after a preemption or a failed node, but not at its time limit: then
the worker asks for the requeue. The worker that sees the end of the study cancels the waiting jobs of its
array.

The database's URL, which may hold a password, reaches a job by a file that only its owner may read.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hpo.cluster.batch.launch import REQUESTS, Launch
from hpo.cluster.postgres.postgres_server import write_secret
from hpo.code import Code
from hpo.config.allowed import ALLOW, DATA_DIR
from hpo.errors import HpoError, InputError, RunError
from hpo.redaction import redact
from hpo.study.running.stopping import SLURM_END, WORKERS_ON_DEVICE, Stop
from hpo.study.store.database import parse_url, storage_url
from hpo.study.store.process import this_job

COMMAND_SECONDS = 60
"""How long a command of Slurm may take: one that cannot reach its server tries for minutes."""

# Older versions of Slurm do not tell a job when it ends; `date` fails where it never does.
_END_OF_JOB = (
    f'[ -n "${SLURM_END}" ] || {{ end=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%e) && '
    f'[ -n "$end" ] && export {SLURM_END}="$(date +%s --date="$end" 2>/dev/null)"; }}'
)
SIGNAL_LEAD = 120
"""Seconds between the warning and the end of a job's time; `--sbatch signal=B:USR1@S` changes it."""
_NO_REQUEUE = "no-requeue"
_NO_REQUEUE_SET = "HPO_NO_REQUEUE"
"""Tells a worker in a job that its owner does not want it requeued."""
_ARRAY = "HPO_SLURM_ARRAY"
"""The array of a job whose worker is in one study; scripts of others may have arrays of several studies."""
_OTHER_GPU_OPTIONS = ("gpus", "gpus-per-task", "gpus-per-socket", "G")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerArray:
    """An array of jobs that are workers of one study."""

    study: str
    storage: str
    """The database's URL; `@FILE` names a file that holds it."""
    folder: Path
    """For the script, the logs and the file with the URL; on a file system that the nodes share."""
    num_workers: int = 1
    """The least; every job has one for each of its GPUs."""
    sbatch: Mapping[str, str | bool] = field(default_factory=dict)
    """More options of sbatch, without their dashes; True for one that takes no value."""
    trust_remote_code: bool = False
    code: Sequence[Code] = ()
    """That of the study, of which the jobs get a copy of each file."""
    allow: str | None = None
    """Their HPO_ALLOW; None: as where they are submitted."""
    launch: Launch = field(default_factory=Launch)

    @property
    def workers_per_job(self) -> int:
        """One for each GPU, or one on the CPU."""
        others = [name for name in _OTHER_GPU_OPTIONS if name in self.sbatch]
        if others or "gpu" in str(self.sbatch.get("gres", "")):
            raise InputError(
                "The GPUs of a job must be given by --gpus-per-node, so that it has a worker on each, but "
                f"got --sbatch {(others or ['gres'])[0]}. Use --gpus-per-node."
            )
        given = str(self.sbatch.get("gpus-per-node", 0))
        count = given.rpartition(":")[2]  # also `a100:4`
        if not count.isdigit():
            raise InputError(f"--gpus-per-node must be a number or TYPE:NUMBER, but got `{given}`.")
        return max(1, int(count))

    def check_time(self) -> None:
        """Raise InputError where a job would be warned, and requeued, before it does anything."""
        limit = seconds_of(str(self.sbatch.get("time", "")))  # None: sbatch says what is wrong with it
        if limit is not None and limit <= SIGNAL_LEAD + 60:  # Slurm may warn a minute early
            raise InputError(
                f"--time must be more than a minute longer than the {SIGNAL_LEAD} s that a job is warned "
                f"before its end, or that is at its beginning, but got `{self.sbatch['time']}`."
            )

    @property
    def num_jobs(self) -> int:
        return math.ceil(self.num_workers / self.workers_per_job)

    @property
    def storage_file(self) -> Path:
        """What the jobs read the database's URL from; one for all submissions of a study to a database."""
        given = self.storage.removeprefix("@")
        if given != self.storage:
            return Path(given).absolute()
        digest = hashlib.sha256(redact(self.storage).encode()).hexdigest()[:8]
        return self.folder.absolute().with_name(f"storage-{digest}")

    def _copy_of(self, code: Code) -> Path:
        return self.folder.absolute() / code.name

    def _places(self) -> list[Path]:
        """The absolute paths that a worker reads or writes."""
        url = parse_url(storage_url(self.storage))
        options = [str(value) for value in url.query.values()]  # a socket, certificates
        named = [*(self.allow or "").split(os.pathsep), *options]
        named += [os.environ.get(name, "") for name in (DATA_DIR, "HF_HOME", "HF_HUB_CACHE")]
        runs = self.folder.absolute().parents[1].resolve()  # may be a link to a larger disk
        named += [str(self.sbatch.get("chdir", Path.cwd())), str(runs), str(self.storage_file)]
        return [Path(place) for place in named if place.startswith("/")]

    def script(self) -> str:
        """The batch script."""
        if container := [name for name in self.sbatch if name.startswith("container")]:
            raise InputError(
                "The container of a job must be given by --apptainer or --pyxis, so that signals reach its "
                f"worker, but got --sbatch {container[0]}."
            )
        worker = ["-m", "hpo", "worker", self.study, "--workers-per-device", "1"]
        worker += ["--trust-remote-code"] if self.trust_remote_code else []
        for code in self.code:
            worker += ["--trust-code", str(self._copy_of(code)) if code.is_file else code.place]
        lines = [
            f"export HPO_STORAGE={shlex.quote(f'@{self.storage_file}')}",
            *([f"export {ALLOW}={shlex.quote(self.allow)}"] if self.allow else []),
            *([f"export {_NO_REQUEUE_SET}=1"] if _NO_REQUEUE in self.sbatch else []),
            f'export {_ARRAY}="$SLURM_ARRAY_JOB_ID"',
            _END_OF_JOB,
            "trap '' USR1  # until the worker listens to it: it would kill Python's start",
            *self.launch.lines(worker, self.folder.absolute(), self._places()),
        ]
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
        given = [
            f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
            for name, value in options.items()
        ]
        return "\n".join(["#!/bin/bash", *given, "", *lines, ""])

    def submit(self) -> str:
        """Submit the array and return its number. Raises InputError without Slurm, or if it refuses the
        options."""
        self.folder.mkdir(parents=True, mode=0o700)
        if not self.storage.startswith("@"):
            write_secret(self.storage_file, self.storage)
        for code in self.code:
            if code.is_file:
                self._copy_of(code).write_bytes(code.files[code.place])
        if self.launch.setup is not None:
            (self.folder / "setup.sh").write_bytes(self.launch.setup)
        script = self.folder / "job.sh"
        script.write_text(self.script())
        # sbatch gives the job the variables that it has itself.
        environment = {name: value for name, value in os.environ.items() if name != "HPO_STORAGE"}
        answer = _slurm(["sbatch", "--parsable", str(script)], environment)
        return answer.strip().partition(";")[0]  # what follows is the cluster, where there are several


def seconds_of(limit: str) -> int | None:
    """Seconds of a time limit as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None: it is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def job_folder(runs: Path, study: str) -> Path:
    """Return a new folder's path for the files of one submission."""
    return runs / study / f"slurm-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}-{os.getpid()}"


def requeue_this_job(ended: str, stop: Stop) -> None:
    """Ask Slurm to run this process's job again if it is `stopped` for want of time; Slurm then ends it.

    When the study is `finished`, the waiting jobs of the array are cancelled. The processes of a supervisor
    ask for nothing.
    """
    job = this_job()
    if job is None or WORKERS_ON_DEVICE in os.environ:
        return
    try:
        if ended == "finished" and _ARRAY in os.environ:
            _tell(["scancel", "--state=PENDING", os.environ[_ARRAY]])
        elif ended == "stopped" and stop.asks_for_requeue and _NO_REQUEUE_SET not in os.environ:
            _tell(["scontrol", "requeue", job.rpartition(":")[2]])
    except HpoError as error:
        _logger.warning("Slurm was not told that this job is %s: %s", ended, error)


def _tell(command: Sequence[str]) -> None:
    """Run a command of Slurm, or leave it to the shell outside of this process's container."""
    if requests := os.environ.get(REQUESTS):
        Path(requests).write_text(f"{shlex.join(command)}\n")
    else:
        _slurm(command)


def _slurm(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command of Slurm and return what it prints."""
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
        said = " ".join(done.stderr.split())
        raise InputError(
            f"`{command[0]}` must succeed, but it says: {said or f'exit code {done.returncode}'}"
        )
    return done.stdout
