from __future__ import annotations

import sqlalchemy as sa
from support.worker_process import begin, evaluate, result, run_trials, study

from hpo.study.claims.leases import WorkerLease
from hpo.study.reading.watch import StudyProgress, StudyWatch, outcome_of
from hpo.study.sampling.promotion import promotion_of
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study


def numbers(progress: StudyProgress) -> tuple[list[tuple[int, list[float]]], list[int]]:
    """The running trials by number with their last value, and the numbers of the ended ones."""
    running = [(trial.number, list(trial.intermediate_values.values())[-1:]) for trial, _ in progress.running]
    return running, [trial.number for trial in progress.ended]


def test_a_trial_is_reported_at_each_pause_and_at_its_end(storage: Storage) -> None:
    config = study(3, pruner={"name": "promote", "starts": 0.1, "keep": 1, "reduction_factor": 2})
    promotion = promotion_of(config.pruner, config.directions, 1)
    create_or_resume_study(storage, config.with_values(n_trials=1))
    watch = StudyWatch(storage, config)
    with WorkerLease(storage, storage.load_study("tiny"), max_retries=0, promotion=promotion) as worker:
        for rung in (0.1, 0.2):
            lease, _ = begin(worker)
            assert numbers(watch.read()) == ([(0, [])], [])
            lease.pause(rung, [0.5])
            assert numbers(watch.read()) == ([(0, [])], []), "its worker writes the checkpoint"
            worker.record_outcome(lease, result("paused"))
            paused = watch.read()
            assert (numbers(paused), paused.num_done) == (([], [0]), 0)
            assert outcome_of(paused.ended[0]) == "paused"
            assert numbers(watch.read()) == ([], [])
        worker.record_outcome(begin(worker)[0], result("complete"))
    last = watch.read()
    assert (numbers(last), last.num_done) == (([], [0]), 1)
    assert outcome_of(last.ended[0]) == "complete"


def test_a_read_does_not_query_ended_trials(storage: Storage) -> None:
    """Its cost does not grow with the study, because a hundred workers may watch."""
    config = study(3)
    create_or_resume_study(storage, config)
    watch = StudyWatch(storage, config, own=True)
    run_trials(storage, config, lambda trial: any(evaluate(storage, trial, step) for step in (1, 2)))
    watch.read()
    statements: list[str] = []
    sa.event.listen(storage.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    assert numbers(watch.read()) == ([], [])
    assert statements
    assert not [text for text in statements if "evaluations" in text or "trial_params" in text]
