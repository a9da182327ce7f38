"""Changes of the wall clock while workers run: no worker counts as dead, and no trial runs twice."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from support.command_line import PYTHON_PATH
from support.worker_process import check_done, notes, study, wait_for, work

from hpo.study.reading.reader import read_study
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
OFFSETS = ("+2", "+0", "+100", "+0", "+86400", "+0")
"""Offsets of the clock in seconds, in this order."""
TRIALS_PER_STEP = 6

CONFIG = study(len(OFFSETS) * TRIALS_PER_STEP + 2, pruner={"name": "none"})


def start_worker(url: str, log: Path, clock: Path, machine: str) -> subprocess.Popen[bytes]:
    """Start a worker whose wall clock follows the file `clock`; its monotonic clock is the real one."""
    faked = {
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # the fix adds the step to waits by the monotonic clock
        "PYTHONPATH": PYTHON_PATH,
    }
    command = [sys.executable, __file__, url, str(log), machine]
    return subprocess.Popen(command, env={**os.environ, **faked})


@pytest.mark.skipif(LIBRARY is None, reason="the package faketime is not installed")
@pytest.mark.parametrize("machines", [("", ""), ("node-1", "node-2")], ids=["here", "elsewhere"])
def test_clock_steps_kill_no_worker(sqlite_url: str, tmp_path: Path, machines: tuple[str, ...]) -> None:
    log, clock = tmp_path / "log", tmp_path / "clock"
    clock.write_text("+0")
    with open_storage(sqlite_url) as storage:
        create_or_resume_study(storage, CONFIG)
        workers = [start_worker(sqlite_url, log, clock, machine) for machine in machines]
        wait_for(lambda: len({line["pid"] for line in notes(log)}) == len(workers))
        for offset in OFFSETS:
            begun = len(notes(log))
            new = clock.with_suffix(".new")
            new.write_text(offset)
            new.rename(clock)
            wait_for(lambda begun=begun: len(notes(log)) >= begun + TRIALS_PER_STEP - 1)
        assert [worker.wait(60) for worker in workers] == [0, 0]
        check_done(storage, CONFIG, log)
        record = read_study(storage, CONFIG.name)
    assert max(Counter(line["number"] for line in notes(log)).values()) == 1, "none runs twice"
    assert "crashed" not in {trial.outcome for trial in record.trials}


if __name__ == "__main__":
    time.sleep = threading.Event().wait  # libfaketime 0.9.10 alters the monotonic end of `time.sleep`
    if sys.argv[3]:
        socket.gethostname = lambda: sys.argv[3]
    work(sys.argv[1], CONFIG, Path(sys.argv[2]), trial_seconds=0.7)
