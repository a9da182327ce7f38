"""Proof of a worker's death: its process, or an unchanged row for a lease."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from support.worker_process import wait_for

from hpo.study.store.schema import workers
from hpo.study.store.storage import Storage, open_storage

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
