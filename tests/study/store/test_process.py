"""Live and dead processes of workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.worker_process import wait_for

from hpo.study.store.process import is_running, process_start, this_machine


def row_of(pid: int, start: str | None, **changes: Any) -> Any:
    return SimpleNamespace(**{"machine": this_machine(), "pid": pid, "process_start": start, **changes})


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield child
    child.kill()
    child.wait()


def test_process_of_this_machine(child: subprocess.Popen[bytes]) -> None:
    start = process_start(child.pid)
    assert is_running(row_of(child.pid, start)) is True
    assert is_running(row_of(child.pid, "1")) is False, "another process has its id"
    assert is_running(row_of(child.pid, start, machine="elsewhere")) is None
    child.kill()
    child.wait()
    assert is_running(row_of(child.pid, start)) is False


def test_stopped_process_needs_heartbeats(child: subprocess.Popen[bytes]) -> None:
    row = row_of(child.pid, process_start(child.pid))
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(lambda: is_running(row) is None)
    os.kill(child.pid, signal.SIGCONT)
    wait_for(lambda: is_running(row) is True)


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_hidden_process_needs_heartbeats(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes], error: type[OSError]
) -> None:
    """`hidepid` hides the processes of other users."""
    read = Path.read_text

    def hidden(path: Path, *args: Any, **kwargs: Any) -> str:
        if str(path) == f"/proc/{child.pid}/stat":
            raise error
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert is_running(row_of(child.pid, "1")) is None
    child.kill()
    child.wait()
    assert is_running(row_of(child.pid, "1")) is False
