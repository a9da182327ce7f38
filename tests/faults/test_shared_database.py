"""Several studies in one database: workers that serve them all, and what a hostile one cannot do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from postgres import PostgresServer
from serving_process import be_worker
from worker_process import finish, notes, start_process, study, wait_for

from hpo.study.reading.overview import StudyOverview, list_studies
from hpo.study.reading.reader import read_study
from hpo.study.running.serving import stays_in
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


def add(storage: Storage, name: str, n_trials: int, priority: int = 0, **changes: Any) -> None:
    create_or_resume_study(storage, study(n_trials, name=name, priority=priority, device="cpu", **changes))


def shares(folder: Path, turn: int) -> Counter[str]:
    """In which studies the workers run their `turn`-th trial."""
    return Counter(line["study"] for line in notes(folder / "log") if line["turn"] == turn)


def test_workers_without_a_name_go_to_the_highest_priority_and_then_where_fewest_are(
    sqlite_url: str, tmp_path: Path
) -> None:
    """When they arrive, and again after each trial."""
    with open_storage(sqlite_url) as storage:
        add(storage, "old", 5)
        add(storage, "new", 5)
        add(storage, "urgent", 1, priority=1)
        workers = []
        for expected in ({"urgent": 1}, {"old": 1}, {"new": 1}, {"old": 1}, {"new": 1}):
            before = shares(tmp_path, 0)
            workers.append(start_process(be_worker, sqlite_url, tmp_path))
            wait_for(lambda: shares(tmp_path, 0).total() == len(workers))
            assert shares(tmp_path, 0) - before == expected
        add(storage, "late", 2, priority=9)
        (tmp_path / "gate-0").touch()
        wait_for(lambda: shares(tmp_path, 1).total() == 5)
        assert shares(tmp_path, 1)["late"] == 2
        (tmp_path / "open").touch()
        finish(*workers)
        ended = notes(tmp_path / "ended")
        assert [(line["ended"], line["left_out"]) for line in ended] == [("idle", {})] * 5
        for found in list_studies(storage):
            n_trials = {"old": 5, "new": 5, "urgent": 1, "late": 2}[found.name]
            assert found.trials == {"open": 0, "running": 0, "done": n_trials, "total": n_trials}
            assert (found.state, found.workers) == ("done", 0)
            record = read_study(storage, found.name)
            assert [trial.outcome for trial in record.trials] == ["complete"] * n_trials
    assert max(Counter(line["trial"] for line in notes(tmp_path / "log")).values()) == 1


@pytest.mark.parametrize(
    ("here", "other", "stays"),
    [
        ({"workers": 3}, {"workers": 2}, True),  # it would be the other way round
        ({"workers": 3}, {"workers": 1}, False),
        ({"workers": 3, "priority": 1}, {"workers": 0}, True),
        ({"workers": 1}, {"workers": 9, "priority": 1}, False),
        ({"workers": 3}, {"workers": 0, "free": 0}, True),
        ({"workers": 3, "free": 0, "priority": 1}, {"workers": 9}, False),  # others run its last trials
    ],
)
def test_when_a_worker_leaves_a_study_for_another(here: Any, other: Any, stays: bool) -> None:
    def overview(name: str, workers: int, free: int = 5, priority: int = 0) -> StudyOverview:
        trials = {"open": free, "running": 1, "done": 0, "total": free + 1}
        return StudyOverview(name, "open", priority, trials, workers, 0.0, 0.0)

    assert stays_in("here", [overview("here", **here), overview("other", **other)]) == stays


BACK = "The database is back"
AWAY = "The database is away"


def said(folder: Path, *words: str) -> int:
    """How often the workers said it."""
    return sum(line["said"].startswith(words) for line in notes(folder / "said"))


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
        wait_for(lambda: said(tmp_path, AWAY) == 3)
        own_server.start()
        wait_for(lambda: said(tmp_path, BACK) == 3)
        add(storage, "first", 3)
        add(storage, "second", 3)
        wait_for(lambda: shares(tmp_path, 1).total() == 3)
        own_server.stop(immediate=True)
        (tmp_path / "open").touch()
        wait_for(lambda: said(tmp_path, AWAY) >= 6)
        own_server.start()
        finish(*workers)
        ended = notes(tmp_path / "ended")
        assert [(line["ended"], line["left_out"]) for line in ended] == [("idle", {})] * 3
        for name, n_trials in (("begun", 3), ("first", 3), ("second", 3)):
            record = read_study(storage, name)
            assert record.slots == {"open": 0, "running": 0, "done": n_trials}
            assert [trial.outcome for trial in record.trials] == ["complete"] * n_trials
    assert sorted(Counter(line["trial"] for line in notes(tmp_path / "log")).values()) == [1] * 9
