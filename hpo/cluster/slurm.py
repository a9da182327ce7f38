"""Workers as Slurm jobs: an array of batch jobs, each of them `hpo worker` on one node.

submitit writes the script. Its pickled functions are not used: the process that runs them takes SIGTERM and
the warning signal for itself and requeues in its own way, while a worker knows best how it leaves, and a
command can be read in the script. The script replaces its shell by the worker, because Slurm sends the
warning (`--signal=B:...`) to the process of the script alone.

Who requeues: Slurm itself, after a preemption, a failed node and `scontrol requeue`. A job that comes to its
time limit would end for good, so the worker asks for the requeue when it has left. After `scancel` nobody
does. A requeued job keeps its number and its log, and ends at once when the study is done.

The database's URL, which may hold a password, reaches a job by a file that only its owner may read: the
script, its arguments and its variables name the file.
"""

from __future__ import annotations

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

from hpo.errors import HpoError, InputError, RunError
from hpo.study.process import this_job
from hpo.study.stopping import SLURM_END, WORKERS_ON_DEVICE, Stop

SCHEDULER = "slurm:"
"""What the ids of its jobs begin with in the database."""
COMMAND_SECONDS = 60
"""How long a command of Slurm may take: one that cannot reach its server tries for minutes."""

# Older versions of Slurm do not tell a job when it ends; `date` fails where it never does.
_END_OF_JOB = (
    'end=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%e) && [ -n "$end" ] && '
    f'export {SLURM_END}="${{{SLURM_END}:-$(date +%s --date="$end" 2>/dev/null)}}"'
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerArray:
    """An array of jobs that are workers of one study."""

    study: str
    """Its name in the database."""
    storage: str
    """The database's URL; `@FILE` names a file that holds it."""
    folder: Path
    """For the script, the logs and the file with the URL; on a file system that the nodes share."""
    num_workers: int = 1
    """The least; every job has one for each of its GPUs."""
    signal_lead: int = 120
    """Seconds between the warning and the end of the job's time."""
    sbatch: Mapping[str, str | bool] = field(default_factory=dict)
    """More options of sbatch, without their dashes; True for one that takes no value."""
    trust_remote_code: bool = False
    """Whether the code that comes with the study's encoder may run in the jobs."""

    @property
    def workers_per_job(self) -> int:
        """One for each GPU, or one on the CPU."""
        given = str(self.sbatch.get("gpus-per-node", 0))
        count = given.rpartition(":")[2]  # also `a100:4`
        if not count.isdigit():
            raise InputError(f"--gpus-per-node must be a number or TYPE:NUMBER, but got `{given}`.")
        return max(1, int(count))

    def check_time(self) -> None:
        """Raise InputError where a job would be warned, and requeued, before it does anything."""
        limit = _seconds(str(self.sbatch.get("time", "")))
        if limit is not None and limit <= self.signal_lead + 60:  # Slurm may warn a minute early
            raise InputError(
                f"--time must be more than a minute longer than --signal-lead, {self.signal_lead} s, or a "
                f"job is warned of its end at its beginning, but got `{self.sbatch['time']}`."
            )

    @property
    def num_jobs(self) -> int:
        return math.ceil(self.num_workers / self.workers_per_job)

    @property
    def storage_file(self) -> Path:
        """What the jobs read the database's URL from."""
        given = self.storage.removeprefix("@")
        return Path(given).absolute() if given != self.storage else self.folder.absolute() / "storage"

    def script(self) -> str:
        """The batch script."""
        worker = [sys.executable, "-m", "hpo", "worker", self.study, "--workers-per-device", "1"]
        worker += ["--trust-remote-code"] if self.trust_remote_code else []
        return batch_script(
            f"exec {shlex.join(worker)}",
            job_name=f"hpo-{re.sub(r'[^A-Za-z0-9_.-]', '_', self.study)}",
            setup=[
                f"export HPO_STORAGE={shlex.quote(f'@{self.storage_file}')}",
                _END_OF_JOB,
                "trap '' USR1  # until the worker listens to it: it would kill Python's start",
            ],
            num_jobs=self.num_jobs,
            options={
                "output": self.folder.absolute() / "%A_%a.log",
                "signal": f"B:USR1@{self.signal_lead}",
                **self.sbatch,
            },
        )

    def submit(self) -> str:
        """Submit the array and return its id, `slurm:123`.

        Raises:
            InputError: there is no Slurm here, or it refuses the options.
        """
        self.folder.mkdir(parents=True, mode=0o700)
        if not self.storage.startswith("@"):
            file = os.open(self.storage_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as opened:
                opened.write(self.storage)
        return sbatch(self.script(), self.folder / "job.sh")


def batch_script(
    command: str,
    *,
    job_name: str,
    options: Mapping[str, Any],
    setup: Sequence[str] = (),
    num_jobs: int | None = None,
) -> str:
    """Return a script for sbatch that runs `command`, on one node and requeued.

    Args:
        options: of sbatch, without their dashes.
        setup: commands that come before.
        num_jobs: of the array; None: it is no array.
    """
    from submitit import SlurmExecutor  # a quarter of a second

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 1  # a script can be shown where Slurm is not

    executor = Executor(Path.cwd())
    executor.update_parameters(
        job_name=job_name,
        time=None,  # the partition's default; submitit's is five minutes
        wckey=None,
        stderr_to_stdout=True,
        use_srun=False,
        setup=list(setup) or None,
        additional_parameters={"chdir": Path.cwd(), "requeue": True, **options},
    )
    if num_jobs is not None:
        executor.parameters["map_count"] = num_jobs
    script: str = executor._make_submission_file_text(command, "")
    return script


def sbatch(script: str, path: Path) -> str:
    """Write a script to `path`, submit it and return the job's id, `slurm:123`.

    Raises:
        InputError: there is no Slurm here, or it refuses the options.
    """
    path.write_text(script)
    # sbatch gives the job the variables that it has itself.
    environment = {name: value for name, value in os.environ.items() if name != "HPO_STORAGE"}
    answer = _slurm(["sbatch", "--parsable", str(path)], environment)
    return f"{SCHEDULER}{answer.strip().partition(';')[0]}"


def _seconds(limit: str) -> int | None:
    """Of a time limit as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for anything else."""
    days, dash, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (days or "0", *parts)) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def job_folder(runs: Path, study: str) -> Path:
    """Return a new folder's path for the files of one submission."""
    return runs / study / f"slurm-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"


def requeue_this_job(ended: str, stop: Stop) -> None:
    """Ask Slurm to run this process's job again if it is `stopped` for want of time; Slurm then ends it.

    Nothing happens outside a job, and in the processes of a supervisor, which itself asks.
    """
    job = this_job()
    if ended != "stopped" or not stop.asks_for_requeue or WORKERS_ON_DEVICE in os.environ:
        return
    if job is None or not job.startswith(SCHEDULER):
        return
    try:
        _slurm(["scontrol", "requeue", job.removeprefix(SCHEDULER)])
    except HpoError as error:
        _logger.warning("This job is not requeued: %s", error)


@dataclass(frozen=True)
class Task:
    """One job of an array, as Slurm knows it."""

    id: str
    """`slurm:123_4`; of those that wait, also `slurm:123_[0-4]`."""
    state: str
    """In Slurm's words: PENDING, RUNNING, COMPLETED ..."""
    reason: str
    """Why it waits: Resources, Priority ...; empty: it does not, or nothing is known."""

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def description(self) -> str:
        """`running`, `pending (Resources)`."""
        return self.state.lower() + (f" ({self.reason})" if self.reason else "")


_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
)


def job_tasks(job_ids: Iterable[str]) -> dict[str, list[Task]]:
    """Return what Slurm knows of these jobs, by their ids; nothing of one that ended minutes ago.

    Jobs of other schedulers are left out.

    Raises:
        InputError, RunError: there is no Slurm here, or it does not answer.
    """
    tasks: dict[str, list[Task]] = {job: [] for job in job_ids if job.startswith(SCHEDULER)}
    if tasks:
        # Not `--jobs`, which is an error where Slurm knows none of them any more.
        listed = _slurm(["squeue", "--noheader", "--array", "--states=all", "--format=%F %i %T %r"])
        for line in listed.splitlines():
            job, task, state, reason = line.split(maxsplit=3)
            if SCHEDULER + job in tasks:
                waits = state == "PENDING" and reason != "None"
                tasks[SCHEDULER + job].append(Task(SCHEDULER + task, state, reason if waits else ""))
    return tasks


def cancel_jobs(job_ids: Iterable[str]) -> list[str]:
    """End these jobs, running and waiting, and return the ids of those that had not ended.

    Their workers write a checkpoint first; nothing is requeued.
    """
    tasks = job_tasks(job_ids)
    living = [job for job, found in tasks.items() if not all(task.has_ended for task in found)]
    if living:
        _slurm(["scancel", *(job.removeprefix(SCHEDULER) for job in living)])
    return living


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
