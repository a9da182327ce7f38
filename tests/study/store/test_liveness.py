"""Proof that a worker is dead: its process, or an unchanged row for a lease."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from support.worker_process import wait_for

from hpo.study.store import storage as storage_module
from hpo.study.store.process import is_running, process_start, this_machine
from hpo.study.store.schema import workers
from hpo.study.store.storage import Availability, Storage, open_storage


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


GAP = 30.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(storage_module.time, "monotonic", lambda: now[0])
    return now


def test_silence_begins_with_a_change_of_the_row(clock: list[float]) -> None:
    seen, silent = Availability(), []
    seen.note_answer(GAP)
    for now, heartbeat in ((0.0, "a"), (20.0, "a"), (40.0, "a"), (45.0, "b"), (60.0, "b"), (80.0, "a")):
        clock[0] = now
        silent.append(seen.silent_seconds("worker", heartbeat, GAP))
        seen.note_answer(GAP)
    assert silent == [0.0, 20.0, 40.0, 0.0, 15.0, 0.0]
    assert seen.silent_seconds("another", "a", GAP) == 0.0


@pytest.mark.parametrize(
    ("outage", "gap", "silent"),
    [
        (False, 0.0, 40.0),
        (True, 0.0, 0.0),  # nobody could write
        (False, 31.0, 0.0),  # this process was stopped
        (False, 29.0, 69.0),
    ],
)
def test_silence_begins_anew_after_a_break(
    clock: list[float], outage: bool, gap: float, silent: float
) -> None:
    seen = Availability()
    seen.note_answer(GAP)
    for now in (0.0, 20.0, 40.0):
        clock[0] = now
        seen.silent_seconds("worker", "a", GAP)
        seen.note_answer(GAP)
    if outage:
        seen.note_outage("down")
        assert seen.is_away
        seen.note_answer(GAP)
        assert not seen.is_away
    clock[0] += gap
    assert seen.silent_seconds("worker", "a", GAP) == silent


LEASE = 1.5


@pytest.fixture
def watcher(storage_url: str) -> Iterator[Storage]:
    with open_storage(storage_url) as storage:
        storage.lease_seconds = LEASE
        yield storage


def add_worker(storage: Storage, **values: Any) -> None:
    row = {"id": "worker", "study": "tiny", "host": "node", "machine": "elsewhere", "pid": 1, "number": 0}
    row |= {"process_start": "1", "started": 0.0, "last_seen": 0.0, "state": "live", "left_out": "[]"}
    storage.write(lambda connection: connection.execute(sa.insert(workers).values({**row, **values})))


def is_live(storage: Storage) -> bool:
    return "worker" in storage.read(storage.live_workers)


@pytest.mark.parametrize("last_seen", [0.0, 1e12])
def test_worker_elsewhere_is_dead_after_a_watched_lease(watcher: Storage, last_seen: float) -> None:
    add_worker(watcher, last_seen=last_seen)
    assert is_live(watcher), "nobody has watched it yet"
    wait_for(lambda: not is_live(watcher))
    with open_storage(watcher.url) as another:
        assert is_live(another)


@pytest.mark.parametrize(("age", "seems_alive"), [(0.0, True), (600.0, False), (-600.0, False)])
def test_readers_use_the_clock_of_the_database(watcher: Storage, age: float, seems_alive: bool) -> None:
    add_worker(watcher, last_seen=watcher.now - age)
    watcher.lease_seconds = 60.0
    assert ("worker" in watcher.read(watcher.heard_workers)) is seems_alive
    assert is_live(watcher)


@pytest.mark.parametrize("beats", [True, False])
def test_watch_ends_with_proof(watcher: Storage, beats: bool) -> None:
    """A heartbeat with an earlier time, after a change of the clock, is also proof."""
    add_worker(watcher)
    wait, clock = watcher.stop.wait, iter(range(100, 0, -1))

    def wait_and_beat(seconds: float | None = None) -> bool:
        if beats:
            beat = sa.update(workers).values(last_seen=float(next(clock)))
            watcher.write(lambda connection: connection.execute(beat))
        return wait(seconds)

    watcher.stop.wait = wait_and_beat  # type: ignore[method-assign]
    assert [row.id for row in watcher.watch_workers()] == (["worker"] if beats else [])
