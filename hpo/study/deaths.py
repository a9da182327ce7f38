"""Whether the death of a worker counts against the configuration that it was running.

A configuration that kills its process (the kernel's out-of-memory killer, a segmentation fault) would be
taken over forever. But most deaths say nothing of the configuration: a node that is taken away, a user's
`kill -9`, a machine that is switched off. So a death counts only if

- the process that started the worker (`run_workers`) saw it end by a signal that a process brings upon
  itself (`SIGSEGV`, `SIGABRT`, ...), or by SIGKILL while the kernel's count of out-of-memory kills rose; or
- it is found by a worker of the same machine that was in the study together with the dead one and lives
  on: then neither the machine nor the group of its workers died, only this process; or
- the kernel's count of out-of-memory kills has risen, within one boot of the machine, since the last
  heartbeat of the dead worker.

The death of the machine, or of all workers of a study on it, costs nothing, however often it happens. The
same holds where a worker is alone on its machine and nobody can tell why it ended.

The place of a death is the step from which the trial would go on, that of its last checkpoint or evaluation,
and how many parameters it had. A death further on than the one before is progress, and counts as the first;
one that came when the trial had ended and its outcome was being stored does not count. The `MAX_DEATHS`-th
at one place ends the trial as `crashed`, which samplers see as infeasible.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from hpo.study.process import this_machine
from hpo.study.schema import workers

if TYPE_CHECKING:
    from hpo.study.storage import Storage

MAX_DEATHS = 2
"""So many deaths at one place end a trial."""

OUT_OF_MEMORY = "the kernel's out-of-memory killer"
_CAUSED_BY_ITSELF = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")


def num_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """How many processes this machine's kernel has killed for want of memory since boot; None: unknown."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:  # not Linux
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def _rose(before: int | None) -> bool:
    now = num_oom_kills()
    return before is not None and now is not None and now > before


def record_death(storage: Storage, pid: int, exit_code: int) -> None:
    """Note how a worker process ended that this process had started; to be called as soon as it is seen.

    Args:
        pid: its process id.
        exit_code: as `subprocess.Popen.returncode`: negative for a signal. Others are not noted.
    """
    if exit_code >= 0:
        return
    name = signal.Signals(-exit_code).name
    alive = (workers.c.machine == this_machine(), workers.c.pid == pid, workers.c.state == "live")

    def action() -> None:
        with storage.engine.begin() as connection:
            for row in connection.execute(sa.select(workers).where(*alive)).all():
                cause = OUT_OF_MEMORY if name == "SIGKILL" and _rose(row.oom_kills) else name
                values = {"state": "dead", "cause": cause}
                connection.execute(sa.update(workers).where(workers.c.id == row.id).values(values))

    storage.persist(action)


def counted_cause(dead: Any, *, outlived: bool) -> str | None:
    """Return the cause of a death that counts against the configuration, else None.

    Args:
        dead: the dead worker's row of `hpo_workers`.
        outlived: the caller was in the study together with the dead worker.
    """
    if dead.cause == OUT_OF_MEMORY or dead.cause in _CAUSED_BY_ITSELF:
        return str(dead.cause)
    if dead.machine is None or _boot(dead.machine) != _boot(this_machine()):
        return None
    if _rose(dead.oom_kills):
        return OUT_OF_MEMORY
    if outlived and dead.machine == this_machine():
        return dead.cause or "unknown"
    return None


def _boot(machine: str) -> str:
    """The part of `this_machine` that all containers of one host share while it is up."""
    return machine.rpartition("/")[0] or machine


def last_saved_step(folder: Path) -> int:
    """The step of the newest checkpoint in a trial's folder, whole or not; 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*[0-9]")), default=0)
