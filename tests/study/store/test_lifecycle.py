"""Studies with workers: paused, cancelled, opened again and deleted."""

from __future__ import annotations

import threading
from typing import Any

import optuna
import pytest
from support.whole_study import num_rows
from support.worker_process import (
    evaluate,
    make_and_run,
    result,
    run_trials,
    study,
    wait_for,
)

from hpo.config.search_space import suggest
from hpo.errors import RunError
from hpo.study.claims.ending import end_unfinished
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import RunSummary
from hpo.study.running.worker import WorkerOptions
from hpo.study.store.lifecycle import (
    delete_study,
    read_state,
    set_state,
    wait_for_workers,
)
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


class Worker:
    """A worker in a thread. Its trial lasts until the study is closed."""

    def __init__(self, url: str, config: Any) -> None:
        self.training = threading.Event()
        self.summary: RunSummary | None = None
        self._thread = threading.Thread(target=self._work, args=(url, config))
        self._thread.start()
        assert self.training.wait(60)

    def _work(self, url: str, config: Any) -> None:
        with open_storage(url) as storage:
            storage.lease_seconds = 0.3

            def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
                suggest(config.search_space, trial)
                evaluate(storage, trial)
                self.training.set()
                wait_for(lease.study_closed.is_set)
                return result("preempted")

            self.summary = make_and_run(config, storage, execute, WorkerOptions(poll_seconds=0.05))

    def left(self) -> RunSummary:
        self._thread.join(60)
        assert self.summary is not None
        return self.summary


def test_paused_study_continues_its_trial(storage: Storage) -> None:
    config = study(3)
    create_or_resume_study(storage, config)
    worker = Worker(storage.url, config)
    assert set_state(storage, "tiny", "paused") == "open"
    assert worker.left() == RunSummary("closed", {"preempted": 1})
    assert wait_for_workers(storage, "tiny", 0) == []
    assert run_trials(storage, config) == RunSummary("closed"), "no trial begins"
    assert end_unfinished(storage, "tiny") == 0, "it is not cancelled"
    before = read_study(storage, "tiny")
    assert (before.state, before.counts) == ("paused", {"open": 3, "running": 0, "done": 0})
    assert [trial.outcome for trial in before.trials] == ["preempted"]
    assert set_state(storage, "tiny", "open") == "paused"
    assert run_trials(storage, config) == RunSummary("finished", {"complete": 3})
    after = read_study(storage, "tiny")
    assert after.trials[0].params == before.trials[0].params
    assert [trial.outcome for trial in after.trials] == ["complete"] * 3


def test_unfinished_trials_of_a_cancelled_study_end(storage: Storage) -> None:
    config = study(3)
    create_or_resume_study(storage, config)
    worker = Worker(storage.url, config)
    set_state(storage, "tiny", "cancelled")
    assert worker.left().ended == "closed"
    assert end_unfinished(storage, "tiny") == 0, "the worker has done so"
    record = read_study(storage, "tiny")
    ended = [(trial.state, trial.outcome, trial.reason) for trial in record.trials]
    assert ended == [("FAIL", "preempted", "the study was cancelled")]
    assert run_trials(storage, config) == RunSummary("closed")
    set_state(storage, "tiny", "open")
    assert run_trials(storage, config) == RunSummary("finished", {"complete": 3})
    record = read_study(storage, "tiny")
    assert [trial.outcome for trial in record.trials] == ["preempted", *["complete"] * 3]
    assert record.counts == {"open": 0, "running": 0, "done": 3}


def test_deletion_removes_all_rows_of_one_study(storage: Storage) -> None:
    run_trials(storage, study(1, name="other"))
    before = num_rows(storage)
    config = study(3)
    create_or_resume_study(storage, config)
    worker = Worker(storage.url, config)
    with pytest.raises(RunError, match="must have no worker, but has process"):
        delete_study(storage, "tiny")
    set_state(storage, "tiny", "cancelled")
    worker.left()
    delete_study(storage, "tiny")
    assert num_rows(storage) == before
    with open_storage(storage.url) as fresh:
        assert read_state(fresh, "tiny") is None
        assert run_trials(fresh, config).outcomes == {"complete": 3}
