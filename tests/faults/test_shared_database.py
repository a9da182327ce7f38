"""Several studies in one database: workers that serve them all, and what a hostile one cannot do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from postgres import PostgresServer
from serving_process import be_worker
from worker_process import finish, notes, start_process, study, wait_for

from hpo.study.overview import list_studies
from hpo.study.storage import Storage, open_storage


def add(storage: Storage, name: str, n_trials: int, priority: int = 0, **changes: Any) -> None:
    storage.create_or_resume_study(study(n_trials, name=name, priority=priority, device="cpu", **changes))


def shares(folder: Path, turn: int) -> Counter[str]:
    """In which studies the workers run their `turn`-th trial."""
    return Counter(line["study"] for line in notes(folder / "log") if line["turn"] == turn)


def test_six_workers_without_a_name_share_the_studies_by_priority(storage_url: str, tmp_path: Path) -> None:
    """Four trials of priority 1 are taken first; then two studies have three workers each, until one comes
    that goes before both."""
    with open_storage(storage_url) as storage:
        add(storage, "old", 10)
        add(storage, "new", 10)
        add(storage, "urgent", 4, priority=1)
        workers = [start_process(be_worker, storage_url, tmp_path) for _ in range(6)]
        wait_for(lambda: shares(tmp_path, 0).total() == 6)
        assert shares(tmp_path, 0) == {"urgent": 4, "old": 1, "new": 1}
        (tmp_path / "gate-0").touch()
        wait_for(lambda: shares(tmp_path, 1).total() == 6)
        assert shares(tmp_path, 1) == {"old": 3, "new": 3}
        assert {study.name: (study.state, study.workers) for study in list_studies(storage)} == {
            "old": ("open", 3),
            "new": ("open", 3),
            "urgent": ("done", 0),
        }
        add(storage, "late", 2, priority=9)
        (tmp_path / "gate-1").touch()
        wait_for(lambda: shares(tmp_path, 2).total() == 6)
        assert shares(tmp_path, 2) == {"late": 2, "old": 2, "new": 2}
        (tmp_path / "open").touch()
        finish(*workers)
        ended = notes(tmp_path / "ended")
        assert [(line["ended"], line["left_out"]) for line in ended] == [("idle", {})] * 6
        for found in list_studies(storage):
            n_trials = {"old": 10, "new": 10, "urgent": 4, "late": 2}[found.name]
            assert found.trials == {"open": 0, "running": 0, "done": n_trials, "total": n_trials}
            assert (found.state, found.workers) == ("done", 0)
            record = storage.read_study(found.name)
            assert [trial.outcome for trial in record.trials] == ["complete"] * n_trials
            assert sum(line["outcomes"].get(found.name, {}).get("complete", 0) for line in ended) == n_trials
    assert max(Counter(line["trial"] for line in notes(tmp_path / "log")).values()) == 1


def test_of_six_workers_in_one_study_three_go_to_another_of_equal_priority(
    storage_url: str, tmp_path: Path
) -> None:
    with open_storage(storage_url) as storage:
        add(storage, "first", 20)
        workers = [start_process(be_worker, storage_url, tmp_path) for _ in range(6)]
        wait_for(lambda: shares(tmp_path, 0).total() == 6)
        add(storage, "second", 20)
        (tmp_path / "gate-0").touch()
        wait_for(lambda: shares(tmp_path, 1).total() == 6)
        assert shares(tmp_path, 1) == {"first": 3, "second": 3}
        (tmp_path / "gate-1").touch()
        wait_for(lambda: shares(tmp_path, 2).total() == 6)
        assert shares(tmp_path, 2) == {"first": 3, "second": 3}
        stayed = {line["pid"] for line in notes(tmp_path / "log") if line["study"] == "second"}
        assert len(stayed) == 3, "who is in one of two equal studies stays there"
        (tmp_path / "open").touch()
        finish(*workers)
        assert [study.trials["done"] for study in list_studies(storage)] == [20, 20]


def said(folder: Path, what: str) -> int:
    """How often the workers said it."""
    return sum(line["said"].startswith(what) for line in notes(folder / "said"))


@pytest.mark.postgres
def test_postgres_crashes_while_workers_without_a_name_wait_and_between_their_trials(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    with own_server.database() as url, open_storage(url) as storage:
        add(storage, "begun", 3)
        workers = [start_process(be_worker, url, tmp_path, idle_timeout=10.0) for _ in range(3)]
        wait_for(lambda: shares(tmp_path, 0).total() == 3)
        (tmp_path / "gate-0").touch()
        wait_for(lambda: [(study.state, study.workers) for study in list_studies(storage)] == [("done", 0)])
        own_server.stop(immediate=True)
        wait_for(lambda: said(tmp_path, "The database is away") == 3)
        own_server.start()
        wait_for(lambda: said(tmp_path, "The database is back") == 3)
        add(storage, "first", 6)
        add(storage, "second", 6)
        wait_for(lambda: shares(tmp_path, 1).total() == 3)
        own_server.stop(immediate=True)
        (tmp_path / "open").touch()
        wait_for(lambda: said(tmp_path, "The database is away") >= 6)
        own_server.start()
        finish(*workers)
        ended = notes(tmp_path / "ended")
        assert [(line["ended"], line["left_out"]) for line in ended] == [("idle", {})] * 3
        for name, n_trials in (("begun", 3), ("first", 6), ("second", 6)):
            record = storage.read_study(name)
            assert record.slots == {"open": 0, "running": 0, "done": n_trials}
            assert [trial.outcome for trial in record.trials] == ["complete"] * n_trials
    assert sorted(Counter(line["trial"] for line in notes(tmp_path / "log")).values()) == [1] * 15
