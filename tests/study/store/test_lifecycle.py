"""Studies with workers: paused, cancelled, opened again, deleted and copied."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState, create_trial
from support.whole_study import contents, filled, num_rows
from support.worker_process import (
    change_worker,
    evaluate,
    make_and_run,
    result,
    run_trials,
    run_until_killed,
    study,
    wait_for,
    worker_on,
)

from hpo.config.search_space import suggest
from hpo.errors import InputError, RunError
from hpo.study.claims.ending import end_unfinished
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import RunSummary
from hpo.study.store import schema
from hpo.study.store.copy import OF_STUDY, OF_TRIAL, OURS, copy_study
from hpo.study.store.lifecycle import delete_study, read_state, set_state, wait_for_workers
from hpo.study.store.optuna_internals import studies, tables, trials
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

CONFIG = study(3)


def run_until_closed(storage: Storage, close: Callable[[], Any]) -> RunSummary:
    """Be a worker whose trial closes the study, and waits until its worker knows."""

    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        suggest(CONFIG.search_space, trial)
        evaluate(storage, trial)
        close()
        wait_for(lease.study_closed.is_set)
        return result("preempted")

    storage.lease_seconds = 0.3
    return make_and_run(CONFIG, storage, execute)


def test_paused_study_continues_its_trial(storage: Storage) -> None:
    summary = run_until_closed(storage, lambda: set_state(storage, "tiny", "paused"))
    assert summary == RunSummary("closed", {"preempted": 1})
    assert wait_for_workers(storage, "tiny", 0) == []
    assert run_trials(storage, CONFIG) == RunSummary("closed"), "no trial begins"
    assert end_unfinished(storage, "tiny") == 0, "it is not cancelled"
    before = read_study(storage, "tiny")
    assert (before.state, before.counts) == ("paused", {"open": 3, "running": 0, "done": 0})
    assert [trial.outcome for trial in before.trials] == ["preempted"]
    assert set_state(storage, "tiny", "open") == "paused"
    assert run_trials(storage, CONFIG) == RunSummary("finished", {"complete": 3})
    after = read_study(storage, "tiny")
    assert after.trials[0].params == before.trials[0].params
    assert [trial.outcome for trial in after.trials] == ["complete"] * 3


def test_unfinished_trials_of_a_cancelled_study_end(storage: Storage) -> None:
    assert run_until_closed(storage, lambda: set_state(storage, "tiny", "cancelled")).ended == "closed"
    assert end_unfinished(storage, "tiny") == 0, "the worker has done so"
    record = read_study(storage, "tiny")
    ended = [(trial.state, trial.outcome, trial.reason) for trial in record.trials]
    assert ended == [("FAIL", "preempted", "the study was cancelled")]
    assert run_trials(storage, CONFIG) == RunSummary("closed")
    set_state(storage, "tiny", "open")
    assert run_trials(storage, CONFIG) == RunSummary("finished", {"complete": 3})
    record = read_study(storage, "tiny")
    assert [trial.outcome for trial in record.trials] == ["preempted", *["complete"] * 3]
    assert record.counts == {"open": 0, "running": 0, "done": 3}


def test_deletion_removes_all_rows_of_one_study(storage: Storage) -> None:
    run_trials(storage, study(1, name="other"))
    before = num_rows(storage)

    def cancel() -> None:
        with pytest.raises(RunError, match="must have no worker, but has process"):
            delete_study(storage, "tiny")
        set_state(storage, "tiny", "cancelled")

    run_until_closed(storage, cancel)
    delete_study(storage, "tiny")
    assert num_rows(storage) == before
    with open_storage(storage.url) as fresh:
        assert read_state(fresh, "tiny") is None
        assert run_trials(fresh, CONFIG).outcomes == {"complete": 3}


@pytest.fixture
def source(sqlite_url: str) -> Iterator[Storage]:
    """A database with a study of all kinds of rows."""
    with open_storage(sqlite_url) as source:
        filled(source)
        yield source


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Storage]:
    with open_storage(f"sqlite:///{tmp_path / 'other.db'}") as other:
        yield other


def test_copy_between_databases_and_back(
    source: Storage, storage_url: str, other: Storage, tmp_path: Path
) -> None:
    target_url = f"sqlite:///{tmp_path / 'target.db'}" if storage_url == source.url else storage_url
    with open_storage(target_url) as target:
        before = contents(source)
        for storage in (target, other):  # so that ids differ
            create_or_resume_study(storage, study(3, name="another")).add_trial(create_trial(value=1.0))
        assert copy_study(source, target, "tiny") == 6
        assert target.trial_counts("tiny") == {"open": 2, "running": 1, "done": 3}
        assert contents(target) == before
        copy_study(target, other, "tiny")
        assert contents(other) == before
        assert contents(source) == before
        assert source.load_study("tiny").trials[3].state == TrialState.RUNNING
        assert read_study(other, "another").name == "another"


def test_every_table_is_copied_or_excluded() -> None:
    stay = {"hpo_compat"}
    ours = {"hpo_studies", "hpo_workers", *(table.name for table in OURS)}
    assert set(schema.metadata.tables) == ours | stay
    optunas = {"trial_heartbeats", "version_info", "alembic_version"}
    copied = {table.name for table in (studies, trials, *OF_STUDY, *OF_TRIAL)}
    assert {table.name for table in tables} - optunas == copied


def test_target_with_a_study_of_this_name_is_refused(source: Storage, other: Storage) -> None:
    create_or_resume_study(other, study(2))
    with pytest.raises(InputError, match=r"has another study `tiny`\. Name another database"):
        copy_study(source, other, "tiny")
    optuna.delete_study(study_name="tiny", storage=other.optuna)  # like the dashboard
    copy_study(source, other, "tiny")
    assert contents(other) == contents(source)
    with pytest.raises(InputError, match="holds the study `tiny` already"):
        copy_study(source, other, "tiny")


def test_study_with_a_live_worker_is_not_copied(storage: Storage, other: Storage) -> None:
    with worker_on(storage, study(4)) as worker:
        set_state(storage, "tiny", "paused")  # it may still train
        with pytest.raises(InputError, match=r"`tiny` has 1\. `hpo pause tiny` lets them leave"):
            copy_study(storage, other, "tiny")
        assert not other.has_study("tiny")
        change_worker(storage, worker, process_start="1")
        copy_study(storage, other, "tiny")
    assert [worker.alive for worker in read_study(other, "tiny").workers] == [False]


def copy_and_die(source_url: str, target_url: str) -> None:
    """Copy the study, and die after the first of our rows, when all rows of Optuna are written."""

    def die(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO hpo_studies "):
            os.kill(os.getpid(), signal.SIGKILL)

    with open_storage(source_url) as source, open_storage(target_url) as target:
        sa.event.listen(target.engine, "after_cursor_execute", die)
        copy_study(source, target, "tiny")


def test_killed_copy_leaves_nothing(source: Storage, storage_url: str, other: Storage) -> None:
    target_url = other.url if storage_url == source.url else storage_url
    with open_storage(target_url) as target:
        run_until_killed(copy_and_die, source.url, target_url)
        assert set(num_rows(target).values()) == {0}
        copy_study(source, target, "tiny")
        assert num_rows(target) == num_rows(source)
