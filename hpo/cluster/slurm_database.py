"""A private PostgreSQL in a Slurm job of its own, where nobody runs one for the workers.

The job stays while its owner has other jobs, waiting or running, and ends `IDLE_CHECKS` minutes after the
last: it cannot know how many studies use it. Warned of its time limit, it stops the server and asks to be
requeued; workers wait meanwhile, for minutes. Where it then runs on another host, they have to be submitted
again: their address of it is old.

The script stays a shell beside the server, because only the process of the script gets Slurm's warning.
"""

from __future__ import annotations

import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from hpo.cluster.postgres_server import PostgresServer
from hpo.cluster.slurm import Task, batch_script, job_tasks, sbatch
from hpo.errors import HpoError, InputError, RunError
from hpo.study.storage import open_storage

JOB_NAME = "hpo_database"
IDLE_CHECKS = 10
"""Of its owner's other jobs, one a minute."""

_POLL_SECONDS = 10.0
"""Between two looks at a job that waits, at most."""

_SCRIPT = """\
stop() {{ kill -TERM "$server"; wait "$server"; }}
trap 'stop; scontrol requeue "$SLURM_JOB_ID"; exit' USR1
trap 'stop; exit' TERM
{start} &
server=$!
idle=0
while kill -0 "$server" 2>/dev/null && [ "$idle" -lt {checks} ]; do
    sleep {seconds} &
    wait -n  # for either; a signal ends this too
    others=$(squeue --me --noheader --format=%j) || continue
    if grep -qvx {name} <<< "$others"; then idle=0; else idle=$((idle + 1)); fi
done
kill -TERM "$server" 2>/dev/null
wait "$server"
"""


@dataclass(frozen=True)
class DatabaseJob:
    """The job that serves the database of a folder."""

    folder: Path
    """On a file system that the nodes share."""
    sbatch: Mapping[str, str | bool] = field(default_factory=dict)
    """Options of sbatch, without their dashes."""
    check_seconds: float = 60.0
    reach_seconds: float = 120.0
    """How long a server that runs may not answer where the job was submitted."""

    @property
    def url_file(self) -> Path:
        return self.folder.absolute() / "url"

    @property
    def _job_file(self) -> Path:
        """Holds the number of the job that was submitted last. Not in the folder, which PostgreSQL makes."""
        return self.folder.with_name(f"{self.folder.name}.job")

    def script(self) -> str:
        """The batch script."""
        place = ["--folder", str(self.folder.absolute()), "--host", "0.0.0.0", "--foreground"]
        return batch_script(
            _SCRIPT.format(
                start=shlex.join([sys.executable, "-m", "hpo", "database", "start", *place]),
                name=JOB_NAME,
                checks=IDLE_CHECKS,
                seconds=self.check_seconds,
            ),
            job_name=JOB_NAME,
            options={
                "output": f"{self.folder.absolute()}.log",
                "cpus-per-task": "1",
                "mem": "2G",
                "signal": "B:USR1@60",
                **self.sbatch,
            },
        )

    def start(self, tell: Callable[[str], None]) -> None:
        """Return when the database answers; its job is submitted if it is not there yet.

        `tell` is called with what the job is waiting for.

        Raises:
            InputError: the folder's server is for this machine alone, or Slurm refuses the options.
            RunError: the job has ended, or its server cannot be reached from here.
        """
        job, told, reason = self._job(), "", ""
        waited, since = 0.5, None
        while True:
            running = PostgresServer(self.folder.absolute()).running()
            if running is not None and running.url:
                problem = _problem(running.url)
                since = since or time.monotonic()
                late = time.monotonic() - since > self.reach_seconds
                # TLS is for other hosts. While a server starts, the URL of last time may still be there.
                local = "sslmode" not in sa.make_url(running.url).query
                if local and (late or not problem):
                    raise InputError(
                        f"The database in {self.folder} must be reached by other hosts, but it runs for "
                        f"{running.host} alone. `hpo database stop` ends it; then submit again."
                    )
                if not problem:
                    return
                if not local and problem != reason:
                    reason = problem
                    tell(f"The database runs on {running.host}, but does not answer here: {reason}")
                if late:
                    raise RunError(
                        f"The database on {running.host} must answer on {socket.gethostname()}, but has not "
                        f"for {self.reach_seconds:.0f} s: {reason}"
                    )
            else:
                since = None
            task = _task(job)
            if running is None and (task is None or task.has_ended):
                if told:
                    raise RunError(f"The database's job {job} has ended. {self._last_words()}")
                job = sbatch(self.script(), self._job_file.with_suffix(".sh"))
                self._job_file.write_text(job)
                task = _task(job)
            if task is not None and task.description != told:
                told = task.description
                tell(f"The database's job {job} is {told}.")
            time.sleep(waited)
            waited = min(1.5 * waited, _POLL_SECONDS)  # it may wait for hours

    def _job(self) -> str | None:
        return self._job_file.read_text().strip() if self._job_file.exists() else None

    def _last_words(self) -> str:
        log = Path(f"{self.folder}.log")
        return f"The end of {log}:\n{log.read_text()[-1000:].strip()}" if log.exists() else "It has no log."


def _problem(url: str) -> str:
    """Why the server does not answer here; empty: it does."""
    try:
        open_storage(url).close()
    except HpoError as error:
        return str(error)
    return ""


def _task(job: str | None) -> Task | None:
    return None if job is None else next(iter(job_tasks([job])[job]), None)
