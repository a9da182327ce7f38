"""Whether a process that wrote its name into the database still lives.

A process id names a process only within one boot of one machine (or container), and is used again after
the process ends. So a process is known by machine, id and start time.
"""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Any

STOPPED_LEASES = 3.0
"""A worker of this machine that was silent for so many leases is dead to others though its process exists, as
one that was stopped. A busy machine delays heartbeats, so this is more than for a worker elsewhere."""


def this_machine() -> str:
    """Name the set of processes that this one can see: host, boot and container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"[-128:]


def process_start(pid: int) -> str | None:
    """When process `pid` of this machine started, in clock ticks since boot.

    None where it is gone; "" where it is another user's and hidden from this one (`hidepid`, see proc(5)).
    """
    try:
        # The fields after the name, which stands in parentheses and may hold anything: proc_pid_stat(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return "" if _exists(pid) else None
    state, start_time = fields[0], fields[19]
    return None if state in "ZX" else start_time  # a zombie is dead, though its parent has not looked


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def this_job() -> str | None:
    """Name the batch job that runs this process, with its task: `slurm:CLUSTER:123_4`."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if job and task:
        return f"slurm:{cluster}:{job}_{task}"
    job = os.environ.get("SLURM_JOB_ID")
    return f"slurm:{cluster}:{job}" if job else None


def is_alive(worker: Any, lease_seconds: float, witnessed_seconds: float = math.inf) -> bool:
    """Whether the process of a row of `hpo_workers` still lives, and runs.

    On this machine a process that is gone is dead at once. Otherwise it lives until it was silent for
    `lease_seconds` (on this machine `STOPPED_LEASES` times that). Two kinds of time do not count: the time
    before the database was started last, in which nobody could write, and the time before
    `witnessed_seconds`.

    Args:
        worker: the row, with the database's time as `now` and when it was started as `database_start`.
        witnessed_seconds: how long the caller has had the database without a break (`Availability`). After an
            outage, the first worker that returns must not take over the trials of all others.
    """
    if worker.state != "live" or worker.last_seen > worker.now + lease_seconds:  # of a damaged row
        return False
    if worker.machine == this_machine():
        start = process_start(worker.pid)
        if start not in (worker.process_start, ""):
            return False
        if start:
            lease_seconds *= STOPPED_LEASES
    heard = max(worker.last_seen, worker.database_start)
    return bool(min(worker.now - heard, witnessed_seconds) < lease_seconds)
