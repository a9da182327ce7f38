"""Claims of live and dead workers, lost leases and lost answers."""

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
from hpo.study.claims.ending import CANCELLED, end_unclaimed, end_unfinished
from hpo.study.claims.lease import MAX_DEATHS, Lease
from hpo.study.claims.leases import WorkerLease
from hpo.study.reading.reader import read_study
from hpo.study.sampling.promotion import WHOLE_ATTR
from hpo.study.sampling.samplers import build_pruner
from hpo.study.store.lifecycle import set_state
from hpo.study.store.optuna_internals import params as stored_params
from hpo.study.store.optuna_internals import trial_id_of
from hpo.study.store.schema import claims, workers
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import BUDGET_SPENT, SOURCE_ATTR, create_or_resume_study

pytestmark = pytest.mark.usefixtures("looks_for_dead_at_each_claim")


@pytest.fixture
def opened(storage: Storage) -> optuna.Study:
    return create_or_resume_study(storage, study(2))


def worker_of(storage: Storage, opened: optuna.Study, max_retries: int = 1) -> WorkerLease:
    return WorkerLease(storage, opened, max_retries=max_retries)


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


def test_death_of_a_worker_with_a_lost_row_does_not_count(storage: Storage, opened: optuna.Study) -> None:
    """A failover leads to an older state."""
    with worker_of(storage, opened) as victim, worker_of(storage, opened) as peer:
        begin(victim)
        storage.write(lambda it: it.execute(sa.delete(workers).where(workers.c.id == victim.id)))
        assert peer.claim().row.deaths == 0


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


def test_a_retry_keeps_the_attributes_of_an_enqueued_trial(storage: Storage, opened: optuna.Study) -> None:
    """An enqueued trial that must run to its end does so after a failure, too."""
    of_user = {SOURCE_ATTR: "hpo enqueue", WHOLE_ATTR: True}
    opened.enqueue_trial({"learning_rate": 1e-4}, of_user)
    with worker_of(storage, opened) as worker:
        lease, trial = begin(worker)
        suggest(study().search_space, trial)
        worker.record_outcome(lease, result("failed", traceback="Traceback"))
        assert begin(worker)[1].user_attrs == {**of_user, "retry_of": 0}


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


@pytest.mark.parametrize(("outcome", "value"), [("complete", 0.5), ("pruned", 0.25)])
def test_outcome_with_a_lost_answer_is_stored_once(
    storage: Storage, opened: optuna.Study, outcome: str, value: float
) -> None:
    with worker_of(storage, opened) as worker:
        lease, trial = begin(worker)
        evaluate(storage, trial, value=0.25)
        for _ in range(2):
            lease.end(result(outcome))
        with pytest.raises(LeaseLostError, match="ended by somebody else"):
            lease.end(result("nonfinite"))
    assert [trial.value for trial in opened.trials] == [value]


def test_trial_ended_by_the_dashboard_does_not_run_again(storage: Storage, opened: optuna.Study) -> None:
    with worker_of(storage, opened) as worker:
        lease, _ = begin(worker)
        optuna.load_study(study_name="tiny", storage=storage.optuna).tell(0, 0.9)
        for outcome in ("complete", "nonfinite"):
            with pytest.raises(LeaseLostError, match="ended by somebody else"):
                worker.record_outcome(lease, result(outcome))
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
        lost = sa.delete(stored_params).where(stored_params.c.param_name == "learning_rate")
        storage.write(lambda it: it.execute(lost))
        worker.record_outcome(lease, result("complete"))
    assert read_study(storage, "tiny").trials[0].params == params


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


def test_evaluation_of_several_objectives_has_no_value_for_pruners(storage: Storage) -> None:
    objectives = [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]
    config = study(1, objective=objectives, pruner={"name": "promote"})
    with worker_on(storage, config) as worker:
        _, trial = begin(worker)
        trial.study.pruner = build_pruner(config.pruner)
        assert not evaluate(storage, trial)
        assert trial.study.trials[0].intermediate_values == {}
        assert read_study(storage, "tiny").trials[0].evaluations


def test_late_worker_begins_no_trial(storage: Storage, opened: optuna.Study) -> None:
    """It has read the study before others paused it, or began its last trials."""
    with worker_of(storage, opened) as late, worker_of(storage, opened) as other:

        def start(number: int) -> Lease | None:
            """Start an enqueued trial."""
            return late._claim(lambda it: late._start(None, seen, it, opened.trials[number], None))

        def begin_new() -> Lease | None:
            return late._claim(lambda it: late._begin(it, seen, None))

        seen = late._watch.read(late.id, late.runnable, None)
        opened.enqueue_trial({})
        set_state(storage, "tiny", "paused")
        assert (begin_new(), start(0)) == (None, None)
        set_state(storage, "tiny", "open")
        begin(other)
        assert start(0) is None, "the other worker has it"
        opened.enqueue_trial({})
        assert start(1) is not None
        opened.enqueue_trial({})
        assert (begin_new(), start(2)) == (None, None), "the study has two trials"
    assert [trial.state.name for trial in opened.trials] == ["RUNNING", "RUNNING", "WAITING"]


def test_comparison_refuses_parameters_of_an_enqueued_trial(storage: Storage, opened: optuna.Study) -> None:
    for params in ({"learning_rate": 1e-4}, {}):
        opened.enqueue_trial(params)
    with worker_on(storage, study(2), is_planned=True) as worker:
        assert begin(worker)[0].number == 1
        assert storage.trial_counts("tiny") == {"open": 1, "running": 1, "done": 0}
    assert opened.trials[0].state == TrialState.FAIL
    assert "A comparison chooses" in opened.trials[0].user_attrs["outcome_reason"]


@pytest.mark.parametrize(
    ("reason", "saved_step", "is_evaluated", "end"),
    [
        (BUDGET_SPENT, 0, True, ("PRUNED", [0.5])),
        (BUDGET_SPENT, 1, False, ("PRUNED", None)),
        (BUDGET_SPENT, 0, False, ("FAIL", None)),
        (CANCELLED, 1, True, ("FAIL", None)),
    ],
)
def test_budget_keeps_begun_training_as_a_trial(
    storage: Storage, opened: optuna.Study, reason: str, saved_step: int, is_evaluated: bool, end: Any
) -> None:
    with worker_of(storage, opened) as worker:
        lease, trial = begin(worker)
        if is_evaluated:
            evaluate(storage, trial)
        lease.saved_step = saved_step
        worker.record_outcome(lease, result("preempted"))
    for owner, ends in ((worker.id, False), (None, True), (None, False)):
        stored = opened.trials[0]
        assert storage.write(lambda it: end_unclaimed(it, "tiny", stored, owner, reason)) == ends  # noqa: B023
    assert (opened.trials[0].state.name, opened.trials[0].values) == end
    assert storage.trial_counts("tiny")["done"] == (end[0] == "PRUNED")


def test_retry_in_a_cancelled_study_is_given_up(storage: Storage, opened: optuna.Study) -> None:
    with worker_of(storage, opened) as alive, worker_of(storage, opened) as other:
        begin(alive)
        other.record_outcome(begin(other)[0], result("failed", traceback="Traceback"))
        set_state(storage, "tiny", "cancelled")
        assert end_unfinished(storage, "tiny") == 1, "the trial of a live worker stays"
        assert [trial.state.name for trial in opened.trials] == ["RUNNING", "FAIL", "FAIL"]
    assert end_unfinished(storage, "tiny") == 1
    assert end_unfinished(storage, "absent") == 0
    assert storage.trial_counts("tiny") == {"open": 2, "running": 0, "done": 0}
