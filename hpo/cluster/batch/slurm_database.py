"""A private PostgreSQL in a separate Slurm job, where nobody runs one for the workers.

The job stays while its owner has other jobs, waiting or running, and ends `IDLE_CHECKS` minutes after the
last: it cannot know how many studies use it. Warned of its time limit, it stops the server and asks to be
requeued; workers wait meanwhile, for minutes. Where it then runs on another host, they have to be submitted
again: their address of it is old.

The script stays a shell beside the server, because only the process of the script gets Slurm's warning.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from hpo.cluster.batch.slurm import Task, batch_script, job_tasks, sbatch
from hpo.cluster.postgres.postgres_server import PostgresServer, connection_problem, is_loopback
from hpo.errors import InputError, RunError

JOB_NAME = "hpo_database"
IDLE_CHECKS = 10
"""Of its owner's other jobs, one a minute."""

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
        where = ["--folder", str(self.folder.absolute()), "--host", "0.0.0.0", "--foreground"]
        start = shlex.join([sys.executable, "-m", "hpo", "database", "start", *where])
        script = _SCRIPT.format(start=start, name=JOB_NAME, checks=IDLE_CHECKS, seconds=self.check_seconds)
        options = {"output": f"{self.folder.absolute()}.log", "cpus-per-task": "1", "mem": "2G"}
        return batch_script(
            script, job_name=JOB_NAME, options={**options, "signal": "B:USR1@60", **self.sbatch}
        )

    def start(self, tell: Callable[[str], None]) -> None:
        """Return when the database answers; its job is submitted if it is not there yet.

        `tell` is called with what the job is waiting for.

        Raises:
            InputError: the folder's server is for this machine alone, or Slurm refuses the options.
            RunError: the job has ended, or its server cannot be reached from here.
        """
        server, told, since = PostgresServer(self.folder.absolute()), "", None
        job = self._job_file.read_text().strip() if self._job_file.exists() else None
        while True:
            running = server.running()
            if running is not None and running.url:
                if not (problem := connection_problem(running.url)):
                    if not is_loopback(str(sa.make_url(running.url).host)):
                        return
                    raise InputError(
                        f"The database in {self.folder} must be reached by other hosts, but it runs for "
                        f"{running.host} alone. `hpo database stop` ends it; then submit again."
                    )
                since = since or time.monotonic()
                if time.monotonic() - since > self.reach_seconds:
                    raise RunError(
                        f"The database on {running.host} must answer here, but has not for "
                        f"{self.reach_seconds:.0f} s: {problem}"
                    )
            task = _task(job)
            if running is None and (task is None or task.has_ended):
                if told:
                    log = Path(f"{self.folder}.log")
                    said = log.read_text()[-1000:].strip() if log.exists() else "It has no log."
                    raise RunError(f"The database's job {job} has ended. The end of {log}:\n{said}")
                job = sbatch(self.script(), self._job_file.with_suffix(".sh"))
                self._job_file.write_text(job)
                task = _task(job)
            if task is not None and task.description != told:
                told = task.description
                tell(f"The database's job {job} is {told}.")
            time.sleep(1.0)


def _task(job: str | None) -> Task | None:
    """What Slurm knows of a job; None: nothing, as of one of another cluster."""
    return next(iter(job_tasks([job]).get(job, ())), None) if job else None
