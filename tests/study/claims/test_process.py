"""Which processes of the database live."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worker_process import wait_for

from hpo.study.claims.process import is_alive, process_start, this_machine


@pytest.mark.parametrize(
    ("last_seen", "database_start", "witnessed", "alive"),
    [
        (39.0, 0.0, math.inf, False),
        (41.0, 0.0, math.inf, True),
        (0.0, 41.0, math.inf, True),  # nobody could write before
        (0.0, 39.0, math.inf, False),
        (39.0, 0.0, 59.0, True),  # the one who judges was cut off, too
        (39.0, 0.0, 61.0, False),
        (41.0, 0.0, 61.0, True),
        (159.0, 0.0, math.inf, True),
        (1e12, 0.0, math.inf, False),  # of a damaged row
    ],
)
def test_silence_counts_while_the_worker_could_be_heard(
    last_seen: float, database_start: float, witnessed: float, alive: bool
) -> None:
    row = SimpleNamespace(
        state="live", machine="elsewhere", now=100.0, last_seen=last_seen, database_start=database_start
    )
    assert is_alive(row, 60.0, witnessed) == alive


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_a_process_that_is_hidden_is_judged_by_its_heartbeat(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """`hidepid` hides the processes of other users."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    read = Path.read_text

    def hidden(path: Path, *args: Any, **kwargs: Any) -> str:
        if str(path) == f"/proc/{child.pid}/stat":
            raise error
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", hidden)
    row = {"state": "live", "machine": this_machine(), "pid": child.pid, "process_start": "1", "now": 100.0}
    alive = {seen: SimpleNamespace(**row, last_seen=seen, database_start=0.0) for seen in (39.0, 41.0)}
    assert [is_alive(alive[seen], 60.0) for seen in (39.0, 41.0)] == [False, True]
    child.kill()
    child.wait()
    assert not is_alive(alive[41.0], 60.0)


@pytest.mark.parametrize(
    ("silent", "witnessed", "alive"),
    [(60.0, math.inf, True), (190.0, math.inf, False), (190.0, 100.0, True)],
)
def test_a_worker_of_this_machine_that_was_stopped_is_dead(
    silent: float, witnessed: float, alive: bool
) -> None:
    row = {"state": "live", "machine": this_machine(), "pid": os.getpid(), "now": 1000.0}
    start = {"process_start": process_start(os.getpid()), "database_start": 0.0}
    worker = SimpleNamespace(**row, **start, last_seen=1000.0 - silent)
    assert is_alive(worker, 60.0, witnessed) == alive


def test_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert process_start(child.pid) is not None
    child.kill()
    wait_for(lambda: process_start(child.pid) is None)
    child.wait()
    assert process_start(child.pid) is None


def test_machine_is_named_the_same_in_other_processes() -> None:
    code = "from hpo.study.claims.process import this_machine; print(this_machine())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == this_machine()
