"""Trials that pause after a short start, of which the best go on: whoever dies, and wherever."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from worker_process import (
    PLACES,
    begin,
    die_at,
    evaluate,
    finish,
    note,
    notes,
    result,
    run_until_killed,
    start_process,
    study,
)

from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.study.checkpoints.keep_best import without_checkpoints
from hpo.study.claims.leases import Lease, WorkerLease
from hpo.study.reading.overview import list_studies
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord, TrialRecord, best_trials
from hpo.study.running.worker import RunSummary, WorkerOptions, run_worker
from hpo.study.sampling.promotion import ORIGIN_ATTR, PAUSED_ATTR, RESUMED_ATTR, promotion_of
from hpo.study.sampling.samplers import build_pruner, build_sampler
from hpo.study.store.lifecycle import end_unfinished, set_state
from hpo.study.store.schema import slots
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

SPACE = {"batch_size": {"type": "categorical", "choices": list(range(1, 9))}}
PRUNER = {"name": "promote", "starts": 0.05, "keep": 2, "reduction_factor": 9}
"""Its rungs are at 0.05 and 0.45. All of eight trials go on from the first, when all have begun."""
CONFIG = study(8, sampler={"name": "grid"}, search_space=SPACE, pruner=PRUNER)


PROMOTION = promotion_of(CONFIG.pruner, CONFIG.directions, 1000)
assert PROMOTION is not None
AT_ONCE = study(8, sampler={"name": "grid"}, search_space=SPACE, pruner={**PRUNER, "reduction_factor": 2})
"""Of each rung half go on at once."""


NUM_EVALUATIONS = 4
"""Of a whole trial: it pauses after the first and the second."""


def value(params: dict[str, Any], index: int) -> float:
    """The greater, the better, at each evaluation."""
    return params["batch_size"] / 100 + index / 1000


def train(storage: Storage, log: Path, trial: optuna.trial.Trial, lease: Lease, broken: int | None) -> Any:
    """A trial which pauses at its rungs as `TrialRunner` has it."""
    params = suggest(CONFIG.search_space, trial)
    lease.store_params()
    resumed_at = trial.user_attrs.get(RESUMED_ATTR, 0.0)
    for index in range(math.ceil(NUM_EVALUATIONS * resumed_at) + 1, NUM_EVALUATIONS + 1):
        evaluate(storage, trial, index, value(params, index), step=10 * index)
        note(log, number=trial.number, index=index, **params)
        if resumed_at == 0.45 and params["batch_size"] == broken:
            return result("nonfinite")
        if rung := PROMOTION.pauses_at(index / NUM_EVALUATIONS, resumed_at):
            storage.persist(lambda: trial.set_user_attr(PAUSED_ATTR, rung))
            return result("pruned", reason="paused")
    return result("complete", values=(value(params, NUM_EVALUATIONS),))


def work(url: str, log: Path, kill: str = "", kill_at: int = 1, broken: int | None = None) -> RunSummary:
    """Be a worker of `CONFIG`; it dies when `kill` happens for the `kill_at`-th time."""
    die_at(kill, kill_at)
    with open_storage(url) as storage:

        def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
            return train(storage, log, trial, lease, broken)

        return run_worker(CONFIG, storage, execute, WorkerOptions(poll_seconds=0.02))


def check(storage: Storage, *, ended: set[int], side_by_side: bool = False) -> StudyRecord:
    """Each configuration has started once and gone on from rung to rung. These, named by their batch size,
    have ended; with trials that started side by side, perhaps others that paused before these."""
    record = read_study(storage, CONFIG.name)
    assert record.slots == {"open": 0, "running": 0, "done": 8}
    assert {trial.state for trial in record.trials} <= {"COMPLETE", "PRUNED"}
    of_start: dict[int, list[TrialRecord]] = {}
    for trial in record.trials:
        of_start.setdefault(trial.origin, []).append(trial)
    assert sorted(trials[0].params["batch_size"] for trials in of_start.values()) == list(range(1, 9))
    for trials in of_start.values():
        assert {trial.params["batch_size"] for trial in trials} == {trials[0].params["batch_size"]}
        assert [trial.attributes.get(RESUMED_ATTR) for trial in trials] == [None, 0.05, 0.45][: len(trials)]
        paused_at = [trial.attributes.get(PAUSED_ATTR) for trial in trials if trial.outcome == "pruned"]
        assert paused_at == [0.05, 0.45][: len(paused_at)]
    complete = {trial.params["batch_size"] for trial in record.trials if trial.outcome == "complete"}
    assert complete >= ended if side_by_side else complete == ended
    return record


def test_the_best_two_of_eight_end(storage: Storage, tmp_path: Path) -> None:
    assert work(storage.url, tmp_path / "log").ended == "finished"
    record = check(storage, ended={7, 8})
    for trial in record.trials:
        num_evaluations = {0.05: 1, 0.45: 2, None: NUM_EVALUATIONS}[trial.attributes.get(PAUSED_ATTR)]
        steps = [10 * index for index in range(1, num_evaluations + 1)]
        assert [row.step for row in trial.evaluations] == steps
        reports = storage.load_study(CONFIG.name).trials[trial.number].intermediate_values
        assert reports == {step // 10: value(trial.params, step // 10) for step in steps}
    (best,) = best_trials(record)
    assert (best.params, best.values) == ({"batch_size": 8}, (value({"batch_size": 8}, NUM_EVALUATIONS),))
    done = Counter((line["batch_size"], line["index"]) for line in notes(tmp_path / "log"))
    assert set(done.values()) == {1}, "nothing is trained twice"


def test_the_best_goes_on_before_another_starts(storage: Storage) -> None:
    with worker_on(storage, AT_ONCE) as worker:
        numbers, origins = [], []
        for _ in range(4):
            lease, trial = begin(worker)
            train(storage, Path(os.devnull), trial, lease, None)
            worker.record_outcome(lease, trial, result("pruned"))
            numbers.append(trial.params["batch_size"])
            origins.append(trial.user_attrs.get(ORIGIN_ATTR))
    assert origins[:2] == [None, None]
    assert numbers[2] == max(numbers[:2])
    assert (origins[2], origins[3]) == (numbers.index(numbers[2]), None)


def test_one_that_breaks_leaves_its_place_to_the_next(storage: Storage, tmp_path: Path) -> None:
    work(storage.url, tmp_path / "log", broken=8)
    check(storage, ended={6, 7})


def test_workers_side_by_side_let_the_same_go_on_as_one(storage_url: str, tmp_path: Path) -> None:
    finish(*(start_process(work, storage_url, tmp_path / "log") for _ in range(8)))
    with open_storage(storage_url) as storage:
        check(storage, ended={7, 8}, side_by_side=True)


def kills() -> Iterator[Any]:
    """On PostgreSQL only the three where most is half done are fast tests."""
    for place in [place for place in PLACES if place not in ("training", "half suggested")]:
        for kill_at in (2, 9):
            is_fast = kill_at == 9 and place in ("trial made", "half of the outcome", "trial ended")
            marks = [pytest.mark.postgres, *([] if is_fast else [pytest.mark.slow])]
            yield pytest.param("sqlite", place, kill_at)
            yield pytest.param("postgres", place, kill_at, marks=marks)


@pytest.mark.parametrize(("kind", "place", "kill_at"), list(kills()))
def test_a_kill_at_any_place_loses_no_start_and_trains_nothing_twice(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, place: str, kill_at: int
) -> None:
    """The 2nd time it happens to a start; the 9th to a trial that goes on, or to its claim."""
    storage_url, log = request.getfixturevalue(f"{kind}_url"), tmp_path / "log"
    run_until_killed(work, storage_url, log, place, kill_at)
    work(storage_url, log)
    with open_storage(storage_url) as storage:
        check(storage, ended={7, 8})
    done = Counter((line["batch_size"], line["index"]) for line in notes(log))
    again = sum(count - 1 for count in done.values())
    assert again <= 2, "but for the trial in hand, which has no checkpoint here"


def pause_all(storage: Storage, config: StudyConfig = CONFIG) -> list[float]:
    """Begin all trials of the study, and end when all have paused at the last rung; their values."""
    with worker_on(storage, config) as worker:
        for _ in range(2 * config.n_trials):
            lease, trial = begin(worker)
            train(storage, Path(os.devnull), trial, lease, None)
            worker.record_outcome(lease, trial, result("pruned"))
    return [trial.values[0] for trial in storage.load_study(config.name).trials[config.n_trials :]]


def worker_on(storage: Storage, config: StudyConfig = CONFIG, **options: Any) -> WorkerLease:
    study = create_or_resume_study(storage, config)
    study.sampler = build_sampler(config.sampler, config.search_space)
    study.pruner = build_pruner(config.pruner)
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    return WorkerLease(storage, study, max_retries=1, promotion=promotion, **options)


def test_a_cancelled_study_that_is_opened_again_lets_those_go_on_that_had_paused(
    storage: Storage, tmp_path: Path
) -> None:
    pause_all(storage)
    set_state(storage, CONFIG.name, "cancelled")
    assert end_unfinished(storage, CONFIG.name) == 0
    set_state(storage, CONFIG.name, "open")
    work(storage.url, tmp_path / "log")
    check(storage, ended={7, 8})


def test_fewer_trials_than_have_begun_take_nothing_back(storage: Storage, tmp_path: Path) -> None:
    pause_all(storage)
    create_or_resume_study(storage, CONFIG.with_values(n_trials=3))
    work(storage.url, tmp_path / "log")
    check(storage, ended={7, 8})


def test_one_that_fails_goes_on_from_its_checkpoint_and_gives_its_place_to_nobody(storage: Storage) -> None:
    pause_all(storage)
    study = storage.load_study(CONFIG.name)
    with worker_on(storage) as worker:
        lease, trial = begin(worker)
        lease.saved_step = 40
        worker.record_outcome(lease, trial, result("failed", traceback="Traceback"))
        origin = trial.user_attrs[ORIGIN_ATTR]
        assert origin not in without_checkpoints(study, 0, storage.trials_in_work(CONFIG.name))
        seen = {origin}
        while lease := worker.claim():
            trial = worker.open_trial(lease)
            assert lease.saved_step == (40 if trial.user_attrs[ORIGIN_ATTR] == origin else 0)
            seen.add(trial.user_attrs[ORIGIN_ATTR])
            worker.record_outcome(lease, trial, result("complete"))
    assert len(seen) == 2, "no third one took the place of the one that was tried again"
    assert set(study.trials[origin].params) == {"batch_size"}


def test_what_another_device_must_go_on_with_is_left_to_it(storage: Storage) -> None:
    """All have begun, and the best two cannot run here: nothing is left for this worker."""
    pause_all(storage)
    with worker_on(storage, can_run=lambda params: params.get("batch_size", 1) < 7) as worker:
        assert worker.claim() is None
        assert sorted(params["batch_size"] for params in worker.unfinished().values()) == [7, 8]
    with worker_on(storage) as other:
        begin(other)
        with worker_on(storage, can_run=lambda params: params.get("batch_size", 1) < 7) as worker:
            assert worker.claim() is None
            batch_sizes = {params["batch_size"] for params in worker.unfinished().values()}
            assert {5, 6, 7, 8} <= batch_sizes, "if the one that runs breaks, the next goes on"


def test_a_slot_whose_worker_died_before_it_told_of_the_pause(storage: Storage, tmp_path: Path) -> None:
    """The trial is PRUNED, and the slot runs: it is not taken for one that goes on."""
    values = pause_all(storage)
    worst = values.index(min(values))
    with storage.engine.begin() as connection:
        of_trial = sa.update(slots).where(slots.c.trial_number == CONFIG.n_trials + worst)
        connection.execute(of_trial.values(state="running", owner="gone"))
    work(storage.url, tmp_path / "log")
    check(storage, ended={7, 8})


def test_paused_trials_need_a_worker_where_none_runs(storage: Storage) -> None:
    """A worker that serves all studies comes to let them go on, and to none that wait for another's."""
    pause_all(storage)
    assert [study.trials for study in list_studies(storage)] == [
        {"open": 7, "running": 0, "done": 1, "total": 8}
    ], "one is the worst of eight, of which two go on"
    with worker_on(storage) as worker:
        begin(worker)
        [study] = list_studies(storage)
    assert study.trials["open"] == 1, "the other of the best two"
    assert study.trials["running"] + study.trials["done"] == 7


def test_with_another_pruner_none_goes_on_and_the_study_ends(storage: Storage) -> None:
    pause_all(storage)
    config = study(8, sampler={"name": "grid"}, search_space=SPACE, pruner={"name": "none"})
    summary = run_worker(config, storage, lambda *_: result("complete"), WorkerOptions(poll_seconds=0.02))
    assert (summary.ended, summary.outcomes) == ("finished", {})
    assert storage.trial_counts(CONFIG.name) == {"open": 0, "running": 0, "done": 8}
