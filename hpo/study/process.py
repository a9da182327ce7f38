"""Whether a process that wrote its name into the database still lives.

A process id names a process only within one boot of one machine (or container), and is used again after
the process ends. So a process is known by machine, id and start time.
"""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any


def this_machine() -> str:
    """Name the set of processes that this one can see: host, boot and container."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # not Linux: the host name has to do
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return "/".join(parts)[-128:]


def process_start(pid: int) -> str | None:
    """Return when process `pid` of this machine started, in the system's own terms; None if it is gone."""
    try:
        # The fields after the name, which stands in parentheses and may hold anything: proc_pid_stat(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
        ps = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(ps, capture_output=True, text=True, check=False).stdout.strip() or None
    state, start_time = fields[0], fields[19]
    return None if state in "ZX" else start_time  # a zombie is dead, though its parent has not looked


def is_alive(worker: Any, lease_seconds: float) -> bool:
    """Whether the process of a row of `hpo_workers` with the database's time `now` still lives."""
    if worker.state != "live":
        return False
    if worker.machine == this_machine():
        return bool(process_start(worker.pid) == worker.process_start)
    return bool(worker.now - worker.last_seen < lease_seconds)
