"""Which deaths of workers count against the configuration that was running, and when they end its trial.

A configuration that kills its process (the kernel's out-of-memory killer, a segmentation fault) would be
taken over forever. But most deaths say nothing of the configuration: a node that is taken away, a user's
`kill -9`, a machine that is switched off. So a death counts only if

- the process that started the worker (`run_workers`) saw it end by a signal that a process brings upon
  itself (`SIGSEGV`, `SIGABRT`, ...), or by SIGKILL while the kernel's count of out-of-memory kills rose; or
- it is found by a worker of the same machine that was in the study together with the dead one and lives
  on: then neither the machine nor the group of its workers died, only this process; or
- the kernel's count of out-of-memory kills has risen, within one boot of the machine, since the last
  heartbeat of the dead worker. The kernel does not say whom it killed, so this may have been another process.

The death of the machine, or of all workers of a study on it, costs nothing, however often it happens. The
same holds where a worker is alone on its machine and nobody can tell why it ended.

The place of a death is the step from which the trial would go on, that of its last checkpoint or evaluation,
and how many parameters it had. A death further on than the one before is progress, and counts as the first;
one that came when the trial had ended and its outcome was being stored does not count. The `MAX_DEATHS`-th
at one place ends the trial as `crashed`, which samplers see as infeasible.

A worker that takes over a slot whose owner died decides this, in the transaction in which it does so.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from hpo.study.process import this_machine
from hpo.study.schema import evaluations, workers

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from hpo.study.storage import Storage

MAX_DEATHS = 2
"""So many deaths at one place end a trial."""

OUT_OF_MEMORY = "the kernel's out-of-memory killer"
_CAUSED_BY_ITSELF = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")


@dataclass(frozen=True)
class Deaths:
    """The deaths that count against the configuration of a slot's trial."""

    count: int = 0
    """At the place of the last."""
    step: int = 0
    """From where the trial would go on after the last."""
    num_params: int = 0
    """How many parameters the trial had then."""
    cause: str = ""
    """Of the last, if this worker found it."""

    @classmethod
    def of_slot(cls, slot: sa.Row[Any]) -> Deaths:
        """As a row of `hpo_slots` has them."""
        return cls(slot.deaths, slot.death_step, slot.death_params)

    @property
    def columns(self) -> dict[str, int]:
        """For a row of `hpo_slots`."""
        return {"deaths": self.count, "death_step": self.step, "death_params": self.num_params}

    @property
    def end_trial(self) -> bool:
        """Whether the trial is to end as `crashed`."""
        return self.count >= MAX_DEATHS

    @property
    def reason(self) -> str:
        """How often the trial's process died, where and, if this worker found it, why."""
        where = f"after step {self.step}" if self.step else "before its first checkpoint"
        why = f" (the last time: {self.cause})" if self.cause else ""
        return f"its process died {self.count} times {where}, without progress{why}."


def count_death(
    connection: sa.Connection, slot: sa.Row[Any], trial: FrozenTrial, saved_step: int, cause: str
) -> Deaths:
    """Return the deaths of a slot with one more, by `cause`.

    `saved_step` is that of the last checkpoint of the slot's trial.
    """
    deaths = Deaths.of_slot(slot)
    last_evaluation = sa.select(sa.func.max(evaluations.c.step)).where(
        evaluations.c.study == slot.study, evaluations.c.trial_number == trial.number
    )
    step = max(connection.execute(last_evaluation).scalar() or 0, saved_step)
    has_progress = step > deaths.step or len(trial.params) > deaths.num_params
    count = 1 if has_progress else deaths.count + 1
    return Deaths(count, max(step, deaths.step), len(trial.params), cause)


def counted_cause(dead: Any, *, outlived: bool) -> str | None:
    """Return the cause of a death that counts, else None.

    Args:
        dead: the worker's row of `hpo_workers`.
        outlived: the caller was in the study together with the dead worker.
    """
    if dead.cause == OUT_OF_MEMORY or dead.cause in _CAUSED_BY_ITSELF:
        return str(dead.cause)
    if _boot(dead.machine) != _boot(this_machine()):
        return None
    if _rose(dead.oom_kills):
        return OUT_OF_MEMORY
    if outlived and dead.machine == this_machine():
        return dead.cause or "unknown"
    return None


def record_death(storage: Storage, pid: int, exit_code: int) -> None:
    """Note how a worker process ended that this process had started; to be called as soon as it is seen.

    Args:
        pid: its process id.
        exit_code: as `subprocess.Popen.returncode`: negative for a signal. Others are not noted.

    Raises:
        OutageError: the database is away.
    """
    if exit_code >= 0:
        return
    name = signal.Signals(-exit_code).name
    of_process = (workers.c.machine == this_machine(), workers.c.pid == pid, workers.c.state == "live")

    def action() -> None:
        with storage.engine.begin() as connection:
            for row in connection.execute(sa.select(workers).where(*of_process)).all():
                cause = OUT_OF_MEMORY if name == "SIGKILL" and _rose(row.oom_kills) else name
                dead = sa.update(workers).where(workers.c.id == row.id)
                connection.execute(dead.values(state="dead", cause=cause))

    storage.attempt(action)


def num_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """How many processes this machine's kernel has killed for want of memory since boot; None: unknown."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:  # hidden from a container
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def _rose(before: int | None) -> bool:
    now = num_oom_kills()
    return before is not None and now is not None and now > before


def _boot(machine: str) -> str:
    """The part of `this_machine` that all containers of one host share while it is up."""
    return machine.rpartition("/")[0] or machine


def last_saved_step(folder: Path) -> int:
    """The step of the newest checkpoint in a trial's folder, whole or not; 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*[0-9]")), default=0)
