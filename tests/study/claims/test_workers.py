"""Membership of a worker: its row in the database, and its heartbeats."""

import json
import math
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pytest
import sqlalchemy as sa
from support.worker_process import begin, change_worker, study, worker_on

from hpo.errors import LeaseLostError, OutageError, RunError
from hpo.outcome import Progress
from hpo.study.claims.workers import BEAT_SECONDS
from hpo.study.store.schema import claims, workers
from hpo.study.store.storage import Storage

CONFIG = study(9)


def rows(storage: Storage) -> list[tuple[str, int, str]]:
    query = sa.select(workers.c.id, workers.c.number, workers.c.state).order_by(workers.c.number)
    return [(*row,) for row in storage.read(lambda it: it.execute(query).all())]


def test_heartbeat_stores_progress_and_sees_a_lost_lease(storage: Storage) -> None:
    with worker_on(storage, CONFIG) as worker:

        def beat() -> sa.Row[Any]:
            worker._beat_once()
            return storage.read(lambda it: it.execute(sa.select(workers)).one())

        lease = worker.claim()
        before = beat()
        assert before.progress is None
        lease.progress = Progress(40, 0.25, math.nan, 12.5, checkpoint_seconds=1.5)
        after = beat()
        assert after.last_seen > before.last_seen
        stored = {**asdict(lease.progress), "train_loss": None, "trial": lease.number}
        assert json.loads(after.progress) == stored
        assert not lease.lost.is_set()
        storage.write(lambda it: it.execute(sa.update(claims).values(owner="other")))
        beat()
        with pytest.raises(LeaseLostError, match="Another worker has taken over trial 0"):
            lease.check()
        worker._lease = None
        assert beat().progress is None


def test_heart_beats_six_times_in_a_lease_and_survives_errors(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, waits = worker_on(storage, CONFIG), list[float]()
    errors = iter([OutageError("the database is away"), RunError("another error")])

    def beat_once() -> None:
        raise next(errors)

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 2

    monkeypatch.setattr(worker, "_beat_once", beat_once)
    monkeypatch.setattr(worker._leaving, "wait", wait)
    for storage.lease_seconds in (3.0, 60.0):
        worker._beat()
    assert (waits, [*errors]) == ([0.5, 0.5, 0.5, BEAT_SECONDS], [])


def test_workers_with_trials_share_their_device(storage: Storage) -> None:
    devices = (None, "GPU-2", "GPU-1", "GPU-1", "GPU-1")
    joined = [worker_on(storage, CONFIG, device=device) for device in devices]

    def num_sharing() -> list[int]:
        return [storage.read(worker._num_sharing) for worker in joined]

    with ExitStack() as stack:
        for worker in joined:
            stack.enter_context(worker)
        for worker in joined[:-1]:
            begin(worker)
        assert num_sharing() == [1, 1, 2, 2, 2], "the last one has no trial"
        change_worker(storage, joined[2], machine="elsewhere")
        assert num_sharing() == [1, 1, 1, 1, 1]


def test_leaving_worker_stores_its_last_checkpoint(storage: Storage) -> None:
    """All machines reach it, so a worker of another machine continues the trial."""
    stays, peer, leaves = (worker_on(storage, CONFIG) for _ in range(3))
    peer.host = leaves.host = "elsewhere"
    with stays, peer:
        with leaves:
            begin(leaves)[0].saved_step = 30
        assert rows(storage) == [(stays.id, 0, "live"), (peer.id, 1, "live"), (leaves.id, 2, "left")]
        row = begin(stays)[0].row
        assert (row.trial_number, row.saved_step, row.deaths) == (0, 30, 0)


def test_repeated_registration_leaves_one_row(storage: Storage) -> None:
    """The answer to the first, committed registration was lost."""
    first, second = (worker_on(storage, CONFIG) for _ in range(2))
    for worker, expected in ((first, 0), (second, 1), (second, 1)):
        worker._register()
        assert worker.number == expected
    assert rows(storage) == [(first.id, 0, "live"), (second.id, 1, "live")]


def test_lost_row_is_added_again(storage: Storage) -> None:
    """A failover leads to an older state."""
    with worker_on(storage, CONFIG) as worker, worker_on(storage, CONFIG) as other:
        storage.write(lambda it: it.execute(sa.delete(workers).where(workers.c.id == worker.id)))
        for _ in range(2):
            worker._beat_once()
            assert rows(storage) == [(other.id, 1, "live"), (worker.id, 2, "live")]


def test_other_workers_on_a_device(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_on(storage, CONFIG, device="GPU-1")._register()
    assert not storage.other_workers_on("GPU-1"), "only this process"
    monkeypatch.setattr("hpo.study.store.storage.os.getpid", lambda: 1)
    found = [bool(storage.other_workers_on(device)) for device in ("GPU-1", "GPU-2")]
    assert found == [True, False]
    storage.write(lambda it: it.execute(sa.update(workers).values(device=None)))
    assert storage.other_workers_on("GPU-2"), "its device is unknown"
    storage.write(lambda it: it.execute(sa.update(workers).values(machine="elsewhere")))
    assert not storage.other_workers_on("GPU-1")
