"""What other processes do to a study, as one looks again and again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from support import worker_process
from support.worker_process import begin, evaluate, result, run_trials, study, wait_for

from hpo.config.search_space import suggest
from hpo.study.claims.lease import Lease
from hpo.study.claims.leases import WorkerLease
from hpo.study.reading.watch import Look, StudyWatch, outcome_of, watching
from hpo.study.running.worker import run_worker
from hpo.study.sampling.promotion import promotion_of
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study
from hpo.trial.telemetry import Progress


def told(look: Look) -> tuple[list[tuple[int, list[float]]], list[int]]:
    """The numbers and last values of the trials that run, and the numbers of those that have ended."""
    running = [(trial.number, list(trial.intermediate_values.values())[-1:]) for trial, _ in look.running]
    return running, [trial.number for trial in look.ended]


def test_a_trial_is_told_with_its_last_evaluation_and_its_end_once(storage: Storage) -> None:
    create_or_resume_study(storage, study(1))
    run_trials(storage, study(1), lambda _: result("complete", values=(0.75,)))
    config = study(2)
    create_or_resume_study(storage, config)
    watch = StudyWatch(storage, config)
    assert told(watch.look()) == ([], []), "what was there before is not told"

    def during(trial: optuna.trial.Trial) -> None:
        [(running, progress)] = watch.look().running
        assert (running.params, running.intermediate_values, progress) == (trial.params, {}, {})
        for index, value in enumerate((0.25, 0.5), start=1):
            evaluate(storage, trial, index, value)
            assert told(watch.look()) == ([(trial.number, [value])], [])

    run_trials(storage, config, during)
    look = watch.look()
    assert told(look) == ([], [1])
    assert (look.best, look.num_done) == ((0.75, 0), 2)
    assert told(watch.look()) == ([], [])


def test_the_look_at_an_end_counts_it(storage: Storage) -> None:
    config = study(1)
    opened = create_or_resume_study(storage, config)
    watch = StudyWatch(storage, config)
    with WorkerLease(storage, opened, max_retries=0) as worker:
        lease, _ = begin(worker)
        look = watch.look()
        assert (told(look), look.num_done) == (([(0, [])], []), 0)
        worker.record_outcome(lease, result("complete", values=(0.5,)))
    look = watch.look()
    assert (told(look), look.num_done) == (([], [0]), 1)


def test_a_trial_is_shown_at_each_pause_and_at_its_end(storage: Storage) -> None:
    config = study(3, pruner={"name": "promote", "starts": 0.1, "keep": 1, "reduction_factor": 2})
    promotion = promotion_of(config.pruner, config.directions, 1)
    create_or_resume_study(storage, config.with_values(n_trials=1))
    watch = StudyWatch(storage, config)
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0, promotion=promotion) as worker:
        for rung in (0.1, 0.2):
            lease, _ = begin(worker)
            assert told(watch.look()) == ([(0, [])], [])
            lease.pause(rung, [0.5])
            assert told(watch.look()) == ([(0, [])], []), "its worker writes the checkpoint"
            worker.record_outcome(lease, result("paused"))
            look = watch.look()
            assert (told(look), look.num_done) == (([], [0]), 0)
            assert outcome_of(look.ended[0]) == "paused"
            assert told(watch.look()) == ([], [])
        worker.record_outcome(begin(worker)[0], result("complete"))
    look = watch.look()
    assert (told(look), look.num_done) == (([], [0]), 1)
    assert outcome_of(look.ended[0]) == "complete"


def test_progress_is_told_every_few_seconds_and_is_that_of_the_workers_trial_alone(storage: Storage) -> None:
    """Far more often than a lease needs to be renewed."""
    config = study(2)
    create_or_resume_study(storage, config)
    watch = StudyWatch(storage, config)

    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        suggest(config.search_space, trial)
        assert watch.look().running[0][1] == {}, "the row still has what was said of the trial before"
        lease.progress = Progress(10 + trial.number, 0.1, 1.5, None)
        wait_for(lambda: watch.look().running[0][1].get("step") == 10 + trial.number, seconds=8)
        return result("complete")

    run_worker(config, storage, execute)


def test_a_trial_that_is_given_back_does_not_run_until_it_goes_on(storage: Storage) -> None:
    config, stop = study(1), threading.Event()
    create_or_resume_study(storage, config)
    watch = StudyWatch(storage, config)
    run_trials(storage, config, lambda _: stop.set() or result("preempted"), stop=stop)
    assert told(watch.look()) == ([], [])
    seen = []
    run_trials(storage, config, lambda _: seen.append(told(watch.look())))
    assert seen == [([(0, [])], [])]
    assert told(watch.look()) == ([], [0])


def test_a_worker_is_told_of_its_own_trials(storage: Storage, tmp_path: Path) -> None:
    config = study(6)
    create_or_resume_study(storage, config)
    other = worker_process.start(storage.url, config, tmp_path / "log", trial_seconds=0.01)
    ended: list[int] = []
    mine: list[int] = []

    def during(trial: optuna.trial.Trial) -> None:
        mine.append(trial.number)
        if len(mine) == 1:
            worker_process.wait_for(lambda: storage.trial_counts("tiny")["done"] >= 3)

    def show(look: Look) -> None:
        ended.extend(trial.number for trial in look.ended)

    with watching(StudyWatch(storage, config, own=True), show, seconds=0.01):
        run_trials(storage, config, during)
    other.join(60)
    assert other.exitcode == 0
    assert 0 < len(mine) <= 3
    assert ended == mine


def test_a_look_reads_no_evaluations_and_no_trial_that_has_ended(storage: Storage) -> None:
    """What it costs does not grow with the study: 2 s may lie between two looks of a hundred workers."""
    config = study(3)
    create_or_resume_study(storage, config)
    watch = StudyWatch(storage, config, own=True)
    run_trials(storage, config, lambda trial: any(evaluate(storage, trial, step) for step in (1, 2)))
    watch.look()
    statements: list[str] = []
    sa.event.listen(storage.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    assert told(watch.look()) == ([], [])
    assert statements
    assert not [text for text in statements if "evaluations" in text or "trial_params" in text]
