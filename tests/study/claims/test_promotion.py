"""Trials that pause after a short start, of which the best go on: whoever dies, and wherever."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from worker_process import PLACES, die_at, evaluate, finish, note, notes, result, start_process, study

from hpo.config.search_space import suggest
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, best_trials
from hpo.study.running.worker import RunSummary, WorkerOptions, run_worker
from hpo.study.sampling.promotion import ORIGIN_ATTR, PAUSED_ATTR
from hpo.study.store.storage import Storage, open_storage

SPACE = {"batch_size": {"type": "categorical", "choices": list(range(1, 9))}}
CONFIG = study(8, sampler={"name": "grid"}, search_space=SPACE, pruner={"name": "promote", "keep": 2})


def value(params: dict[str, Any], index: int) -> float:
    """The greater, the better, at each of ten evaluations."""
    return params["batch_size"] / 100 + index / 1000


def train(storage: Storage, log: Path, trial: optuna.trial.Trial, lease: Lease, broken: int | None) -> Any:
    """A trial of ten evaluations, which pauses at the first as `TrialRunner` has it."""
    params = suggest(CONFIG.search_space, trial)
    lease.store_params()
    goes_on = ORIGIN_ATTR in trial.user_attrs
    for index in range(2 if goes_on else 1, 11):
        evaluate(storage, trial, index, value(params, index), step=10 * index)
        note(log, number=trial.number, index=index, **params)
        if goes_on and params["batch_size"] == broken:
            return result("nonfinite")
        if not goes_on:
            storage.persist(lambda: trial.set_user_attr(PAUSED_ATTR, 1))
            return result("pruned", reason="paused")
    return result("complete", values=(value(params, 10),))


def work(url: str, log: Path, kill: str = "", kill_at: int = 1, broken: int | None = None) -> RunSummary:
    """Be a worker of `CONFIG`; it dies when `kill` happens for the `kill_at`-th time."""
    die_at(kill, kill_at)
    with open_storage(url) as storage:

        def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
            return train(storage, log, trial, lease, broken)

        return run_worker(CONFIG, storage, execute, WorkerOptions(poll_seconds=0.02))


def check(storage: Storage, went_on: set[int]) -> StudyRecord:
    """Each configuration has started once, and those `went_on`, named by their batch size, have ended."""
    record = read_study(storage, CONFIG.name)
    assert record.slots == {"open": 0, "running": 0, "done": 8}
    assert {trial.state for trial in record.trials} <= {"COMPLETE", "PRUNED"}
    starts = [trial for trial in record.trials if ORIGIN_ATTR not in trial.attributes]
    assert sorted(trial.params["batch_size"] for trial in starts) == list(range(1, 9))
    assert {trial.outcome for trial in starts} == {"pruned"}
    later = [trial for trial in record.trials if ORIGIN_ATTR in trial.attributes]
    assert sorted(trial.params["batch_size"] for trial in later) == sorted(went_on)
    for trial in later:
        assert record.trials[trial.origin].params == trial.params
    return record


def test_the_best_two_of_eight_go_on(storage: Storage, tmp_path: Path) -> None:
    summary = work(storage.url, tmp_path / "log")
    assert (summary.ended, summary.outcomes) == ("finished", {"pruned": 8, "complete": 2})
    record = check(storage, {7, 8})
    for trial in record.trials[8:]:
        assert [row.step for row in trial.evaluations] == [10 * index for index in range(1, 11)]
        reports = storage.load_study(CONFIG.name).trials[trial.number].intermediate_values
        assert reports == {index: value(trial.params, index) for index in range(1, 11)}
    (best,) = best_trials(record)
    assert (best.params, best.values) == ({"batch_size": 8}, (value({"batch_size": 8}, 10),))
    done = Counter((line["batch_size"], line["index"]) for line in notes(tmp_path / "log"))
    assert set(done.values()) == {1}, "nothing is trained twice"


def test_one_that_breaks_leaves_its_place_to_the_next(storage: Storage, tmp_path: Path) -> None:
    work(storage.url, tmp_path / "log", broken=8)
    check(storage, {6, 7, 8})


def test_workers_side_by_side_let_the_same_go_on_as_one(storage_url: str, tmp_path: Path) -> None:
    """And perhaps some that were among the best before the others had started."""
    finish(*(start_process(work, storage_url, tmp_path / "log") for _ in range(4)))
    with open_storage(storage_url) as storage:
        record = read_study(storage, CONFIG.name)
        later = [trial.params["batch_size"] for trial in record.trials if ORIGIN_ATTR in trial.attributes]
        assert {7, 8} <= set(later)
        assert len(set(later)) == len(later)
        check(storage, set(later))


@pytest.mark.parametrize("kill_at", [2, 9])
@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("training", "half suggested")])
def test_a_kill_at_any_place_loses_no_start_and_trains_nothing_twice(
    storage_url: str, tmp_path: Path, place: str, kill_at: int
) -> None:
    """The 2nd time it happens to a start; the 9th to a trial that goes on, or to its claim."""
    log = tmp_path / "log"
    process = start_process(work, storage_url, log, place, kill_at)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    work(storage_url, log)
    with open_storage(storage_url) as storage:
        check(storage, {7, 8})
    done = Counter((line["batch_size"], line["index"]) for line in notes(log))
    again = sum(count - 1 for count in done.values())
    assert again <= 10, "but for the trial in hand, which has no checkpoint here"
