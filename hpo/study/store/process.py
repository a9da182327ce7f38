"""Processes of workers: their identity, and a check that they still run.

A process id is unique within one boot of one machine or container, and is reused. So a process is identified
by machine, id and start time.
"""

import os
import socket
from pathlib import Path
from typing import Any


def this_machine() -> str:
    """Return the name of the set of processes visible to this one: host, boot and container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"[-128:]


def process_start(pid: int) -> str | None:
    """Return the start time of process `pid` of this machine. None: it is gone; "": it is hidden."""
    return _read_process(pid)[1]


def _read_process(pid: int) -> tuple[str, str | None]:
    try:
        # The fields after the name. The name is in parentheses and may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return "", "" if _exists(pid) else None
    state, start_time = fields[0], fields[19]
    return state, None if state in "ZX" else start_time  # a zombie is dead


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def this_job() -> str | None:
    """Return the name of the batch job of this process, with its task: `slurm:CLUSTER:123_4`."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if job and task:
        return f"slurm:{cluster}:{job}_{task}"
    job = os.environ.get("SLURM_JOB_ID")
    return f"slurm:{cluster}:{job}" if job else None


def is_running(worker: Any) -> bool | None:
    """Return true if the process of a row of `hpo_workers` runs on this machine.

    None: only heartbeats can tell. It is on another machine, hidden, or stopped (SIGSTOP, a debugger).
    """
    if worker.machine != this_machine():
        return None
    state, start = _read_process(worker.pid)
    if start not in (worker.process_start, ""):
        return False
    return None if not start or state in "Tt" else True
