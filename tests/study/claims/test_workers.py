"""Rows of the workers of a study."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from support.worker_process import study, worker_on

from hpo.study.store.schema import workers
from hpo.study.store.storage import Storage


def rows(storage: Storage) -> list[tuple[str, int]]:
    with storage.engine.connect() as connection:
        query = sa.select(workers.c.id, workers.c.number).order_by(workers.c.number)
        return [(row.id, row.number) for row in connection.execute(query)]


def test_repeated_registration_leaves_one_row(storage: Storage) -> None:
    """The answer to the first, committed registration was lost."""
    first, second = (worker_on(storage, study(1)) for _ in range(2))
    for worker, expected in ((first, 0), (second, 1), (second, 1)):
        worker._register()
        assert worker.number == expected
    assert rows(storage) == [(first.id, 0), (second.id, 1)]


def test_other_workers_on_a_device(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_on(storage, study(1), device="GPU-1")._register()
    assert not storage.has_other_workers_on("GPU-1"), "only this process"
    monkeypatch.setattr("hpo.study.store.storage.os.getpid", lambda: 1)
    found = [storage.has_other_workers_on(device) for device in ("GPU-1", "GPU-2")]
    assert found == [True, False]
    with storage.engine.begin() as connection:
        connection.execute(sa.update(workers).values(device=None))
    assert storage.has_other_workers_on("GPU-2"), "its device is unknown"
    with storage.engine.begin() as connection:
        connection.execute(sa.update(workers).values(machine="elsewhere"))
    assert not storage.has_other_workers_on("GPU-1")
