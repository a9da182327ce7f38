from __future__ import annotations

from collections.abc import Callable

import optuna
import pytest
import sqlalchemy as sa
from support.worker_process import change_worker, run_trials, study

from hpo.study.claims.leases import WorkerLease
from hpo.study.reading.overview import StudyOverview, list_studies
from hpo.study.reading.reader import read_study
from hpo.study.store.lifecycle import set_state
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study


def listed(storage: Storage) -> dict[str, StudyOverview]:
    return {overview.name: overview for overview in list_studies(storage)}


def test_an_overview_counts_trials_and_live_workers(storage: Storage) -> None:
    run_trials(storage, study(2, name="up"))
    run_trials(storage, study(2, name="down"))
    opened = create_or_resume_study(storage, study(5, name="begun"))
    with (
        WorkerLease(storage, opened, max_retries=0) as worker,
        WorkerLease(storage, opened, max_retries=0) as dead,
    ):
        worker.claim()
        dead.claim()
        change_worker(storage, dead, process_start="1")
        overviews = listed(storage)
        change_worker(storage, dead, process_start="0")
    assert list(overviews) == ["up", "down", "begun"]
    assert (overviews["up"].state, overviews["up"].workers) == ("done", 0)
    begun = overviews["begun"]
    assert begun.trials == {"open": 4, "running": 1, "done": 0, "total": 5}
    assert (begun.state, begun.workers) == ("open", 1)
    assert begun.created <= begun.now
    set_state(storage, "begun", "paused")
    optuna.delete_study(study_name="up", storage=storage.optuna)
    assert {name: one.state for name, one in listed(storage).items()} == {"down": "done", "begun": "paused"}


@pytest.mark.parametrize("read", [list_studies, lambda storage: read_study(storage, "s0")])
def test_the_number_of_queries_is_constant(storage: Storage, read: Callable[[Storage], object]) -> None:
    statements: list[str] = []
    sa.event.listen(storage.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    counts = []
    for number in range(3):
        run_trials(storage, study(2 * number + 1, name="s0"))
        run_trials(storage, study(2, name=f"s{number}"))
        statements.clear()
        read(storage)
        counts.append(len(statements))
    assert counts == [counts[0]] * 3
