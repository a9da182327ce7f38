from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState
from support.worker_process import begin, change_worker, evaluate, result, study, worker_on

from hpo.config.search_space import suggest
from hpo.errors import LeaseLostError, OutageError
from hpo.outcome import Progress
from hpo.study.claims import snapshot
from hpo.study.claims.ending import end_unfinished
from hpo.study.claims.lease import MAX_DEATHS
from hpo.study.claims.leases import WorkerLease
from hpo.study.reading.reader import read_study
from hpo.study.sampling.samplers import build_pruner
from hpo.study.store.lifecycle import set_state
from hpo.study.store.optuna_internals import params as stored_params
from hpo.study.store.optuna_internals import trial_id_of
from hpo.study.store.schema import claims, workers
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study


@pytest.fixture
def opened(storage: Storage) -> optuna.Study:
    return create_or_resume_study(storage, study(2))


def worker_of(storage: Storage, opened: optuna.Study, max_retries: int = 1) -> WorkerLease:
    return WorkerLease(storage, opened, max_retries=max_retries)


@pytest.fixture(autouse=True)
def check_for_dead_at_each_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "DEATH_CHECK_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("row", "taken"),
    [
        ({"last_seen": 0.0}, False),  # the process lives
        ({"process_start": "1"}, True),  # another process has its id
        ({"machine": "elsewhere", "last_seen": 0.0}, False),  # the third worker has not watched it yet
        ({"state": "left"}, True),
    ],
)
def test_trial_of_a_dead_worker_is_taken_over(
    storage: Storage, opened: optuna.Study, row: dict[str, Any], taken: bool
) -> None:
    first, second, third = (worker_of(storage, opened) for _ in range(3))
    with first, second, third:
        lease, _ = begin(first)
        second.claim()
        change_worker(storage, first, **row)
        again = third.claim()
        assert (again is not None) == taken
        if again is not None:
            assert again.number == lease.number
            with pytest.raises(LeaseLostError):
                first.record_outcome(lease, result("complete"))
            assert opened.trials[0].state == TrialState.RUNNING, "without the lease it stores nothing"


def die(storage: Storage, worker: WorkerLease, step: int = 0) -> None:
    """End a worker after a heartbeat with a checkpoint of this step."""
    assert worker._lease is not None
    worker._lease.saved_step = step
    worker._beat_once()
    change_worker(storage, worker, process_start="1")


@pytest.mark.parametrize("died", ["after an evaluation", "after a checkpoint", "with its GPU"])
def test_deaths_count_until_progress(storage: Storage, opened: optuna.Study, died: str) -> None:
    with ExitStack() as stack:
        peer = stack.enter_context(worker_of(storage, opened))
        for step, num_deaths in ((0, 1), (30, 1), (30, 2), (30, 3)):
            victim = stack.enter_context(worker_of(storage, opened))
            lease, trial = begin(victim)
            assert trial.number == 0
            if step and died == "after an evaluation":
                evaluate(storage, trial, step=step)
            if died == "with its GPU":
                lease.saved_step = step  # no heartbeat has stored it
                victim.record_death(lease)
                assert storage.trial_counts("tiny") == {"open": 1, "running": 1, "done": 0}
            else:
                die(storage, victim, step if died == "after a checkpoint" else 0)
            lease = peer.claim()
            assert (lease.row.deaths, lease.row.death_step) == (num_deaths, step)
            assert bool(lease.crash) == (num_deaths == MAX_DEATHS)
            peer.record_outcome(lease, result("preempted"))
        assert lease.crash == "its process died 3 times after step 30, without progress."
        assert peer.claim().crash, "the next worker knows it too"


def test_no_death_counts_for_a_trial_of_another_worker(storage: Storage, opened: optuna.Study) -> None:
    with worker_of(storage, opened) as worker, worker_of(storage, opened) as other:
        lease, _ = begin(worker)
        worker.release(lease)
        again, _ = begin(other)
        worker.record_death(lease)
        assert owners(storage) == [other.id]
        other.release(again)
        assert other.claim().row.deaths == 0


def owners(storage: Storage) -> list[str | None]:
    """The workers of the trials, by the trials' numbers."""
    with storage.engine.connect() as connection:
        query = sa.select(claims.c.owner).order_by(claims.c.trial_number)
        return list(connection.execute(query).scalars())


def test_parameters_of_another_process_lose_the_lease(storage: Storage, opened: optuna.Study) -> None:
    """The other process was stopped during its suggestions, or its answer was lost."""
    config = study(2)
    with worker_of(storage, opened) as worker:
        lease, trial = begin(worker)
        drawn = suggest(config.search_space, optuna.trial.Trial(opened, trial_id_of(trial)))
        assert suggest(config.search_space, trial) != drawn
        with pytest.raises(LeaseLostError, match="has another `"):
            lease.store_params()
        assert suggest(config.search_space, begin(worker)[1]) == drawn


def test_heartbeat_stores_progress_and_sees_a_lost_lease(storage: Storage, opened: optuna.Study) -> None:
    with worker_of(storage, opened) as worker:

        def beat() -> sa.Row[Any]:
            worker._beat_once()
            with storage.engine.connect() as connection:
                return connection.execute(sa.select(workers)).one()

        lease = worker.claim()
        before = beat()
        assert before.progress is None
        lease.progress = Progress(40, 0.25, math.nan, 12.5, checkpoint_seconds=1.5)
        after = beat()
        assert after.last_seen > before.last_seen
        assert json.loads(after.progress) == {
            "step": 40,
            "budget_used": 0.25,
            "train_loss": None,
            "examples_per_second": 12.5,
            "checkpoint_seconds": 1.5,
            "trial": lease.number,
        }
        assert not lease.lost.is_set()
        with storage.engine.begin() as connection:
            connection.execute(sa.update(claims).values(owner="other"))
        beat()
        with pytest.raises(LeaseLostError, match="Another worker has taken over trial 0"):
            lease.check()
        worker._lease = None
        assert beat().progress is None


def test_failed_trial_is_retried_with_the_same_parameters(storage: Storage) -> None:
    opened = create_or_resume_study(storage, study(2, max_retries=2))
    with worker_of(storage, opened, max_retries=2) as peer, ExitStack() as stack:
        params = []
        for number in range(3):
            victim = stack.enter_context(worker_of(storage, opened))
            _, trial = begin(victim)
            assert trial.number == number
            frozen = opened.trials[number]
            assert frozen.user_attrs == ({"retry_of": number - 1} if number else {})
            assert frozen.intermediate_values == {}
            params.append(suggest(study().search_space, trial))
            evaluate(storage, trial)
            die(storage, victim, step=100)
            lease = peer.claim()
            assert (lease.row.deaths, lease.row.death_step) == (1, 100), "a retry begins without deaths"
            peer.record_outcome(lease, result("failed", traceback="Traceback"))
        assert params[1:] == params[:2]
        assert storage.trial_counts("tiny") == {"open": 1, "running": 0, "done": 1}, "one of n_trials"
        assert peer.claim().number == 3


@pytest.mark.parametrize("kind", ["new", "waiting", "free"])
def test_claim_with_a_lost_answer_is_made_once(
    storage: Storage, opened: optuna.Study, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "waiting":
        opened.enqueue_trial({"learning_rate": 1e-4})
    if kind == "free":
        with worker_of(storage, opened) as before:
            begin(before)
    attempt, lost = storage.attempt, []

    def attempt_without_answer(action: Callable[[], Any]) -> Any:
        answer = attempt(action)
        if action.__name__ == "claim" and not lost:
            lost.append(answer)
            raise OutageError("the connection broke after the commit")
        return answer

    monkeypatch.setattr(storage, "attempt", attempt_without_answer)
    with worker_of(storage, opened) as worker:
        lease, _ = begin(worker)
        assert lost[0] is not None
        assert (lease.number, lease.row.deaths) == (0, 0)
        assert owners(storage) == [worker.id]
        assert len(opened.trials) == 1


def test_unfinished_trial_is_continued_first(storage: Storage, opened: optuna.Study) -> None:
    with worker_of(storage, opened) as worker:
        zero, _ = begin(worker)
        worker.record_outcome(zero, result("complete"))
        one, trial = begin(worker)
        params = suggest(study().search_space, trial)
        worker.record_outcome(one, result("preempted"))
    create_or_resume_study(storage, study(5))
    with worker_of(storage, opened) as worker:
        lease, trial = begin(worker)
        assert lease.number == trial.number == 1
        assert suggest(study().search_space, trial) == params


def test_trial_ended_by_the_dashboard_does_not_run_again(storage: Storage, opened: optuna.Study) -> None:
    with worker_of(storage, opened) as worker:
        lease, _ = begin(worker)
        optuna.load_study(study_name="tiny", storage=storage.optuna).tell(0, 0.9)
        with pytest.raises(LeaseLostError, match="ended by somebody else"):
            worker.record_outcome(lease, result("nonfinite"))
        assert storage.trial_counts("tiny") == {"open": 1, "running": 0, "done": 1}
        again, _ = begin(worker)
        assert again.number == 1
        worker.record_outcome(again, result("complete"))
        assert worker.claim() is None
        assert not worker.left


def test_parameters_lost_by_the_server_are_written_again(storage: Storage, opened: optuna.Study) -> None:
    """A failover leads to an older state."""
    with worker_of(storage, opened) as worker:
        lease, trial = begin(worker)
        params = suggest(study(2).search_space, trial)
        lease.store_params()
        with storage.engine.begin() as connection:
            lost = stored_params.c.param_name == "learning_rate"
            connection.execute(sa.delete(stored_params).where(lost))
        worker.record_outcome(lease, result("complete"))
    assert read_study(storage, "tiny").trials[0].params == params


def test_enqueued_trials_begin_first(storage: Storage) -> None:
    opened = create_or_resume_study(storage, study(2))
    opened.enqueue_trial({"learning_rate": 1e-4}, user_attrs={"memo": "asked for"})
    with worker_of(storage, opened) as worker:
        lease, trial = begin(worker)
        assert suggest(study().search_space, trial)["learning_rate"] == 1e-4
        worker.record_outcome(lease, result("complete"))
        assert opened.trials[0].user_attrs["memo"] == "asked for"
        assert worker.claim().number == 1
    assert storage.trial_counts("tiny") == {"open": 0, "running": 1, "done": 1}


def test_rungs_outlive_the_worker(storage: Storage) -> None:
    config = study(1, pruner={"name": "asha", "min_resource": 1, "reduction_factor": 2})
    with ExitStack() as stack:
        for index, value in ((1, 0.5), (2, 0.6), (4, 0.7)):
            one = stack.enter_context(open_storage(storage.url))
            opened = create_or_resume_study(one, config)
            opened.pruner = build_pruner(config.pruner)
            worker = stack.enter_context(worker_of(one, opened, max_retries=0))
            assert not evaluate(one, begin(worker)[1], index, value)
            change_worker(one, worker, process_start="1")
        (trial,) = storage.load_study("tiny").get_trials()
    rungs = {key: value for key, value in trial.system_attrs.items() if "rung" in key}
    assert rungs == {"completed_rung_0": 0.5, "completed_rung_1": 0.6, "completed_rung_2": 0.7}


def test_late_worker_begins_no_trial(storage: Storage, opened: optuna.Study) -> None:
    """It has read the study before others paused it, or began its last trials."""
    with worker_of(storage, opened) as late, worker_of(storage, opened) as other:
        seen = late._watch.read(late.id, late.runnable, None)
        set_state(storage, "tiny", "paused")
        assert storage.write(lambda it: late._begin(it, seen, None)) is None
        set_state(storage, "tiny", "open")
        for _ in range(2):
            other.record_outcome(begin(other)[0], result("complete"))
        assert storage.write(lambda it: late._begin(it, seen, None)) is None
    assert len(opened.trials) == 2


def test_retry_in_a_cancelled_study_is_given_up(storage: Storage, opened: optuna.Study) -> None:
    with worker_of(storage, opened) as worker:
        worker.record_outcome(begin(worker)[0], result("failed", traceback="Traceback"))
    set_state(storage, "tiny", "cancelled")
    assert end_unfinished(storage, "tiny") == 1
    assert [trial.state.name for trial in opened.trials] == ["FAIL", "FAIL"]
    assert storage.trial_counts("tiny") == {"open": 2, "running": 0, "done": 0}


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


def test_lost_row_is_added_again(storage: Storage) -> None:
    """A failover leads to an older state."""
    with worker_on(storage, study(2)) as worker, worker_on(storage, study(2)):
        with storage.engine.begin() as connection:
            connection.execute(sa.delete(workers).where(workers.c.id == worker.id))
        worker._beat_once()
        assert (worker.id, 2) in rows(storage)
        worker._beat_once()
        assert len(rows(storage)) == 2
