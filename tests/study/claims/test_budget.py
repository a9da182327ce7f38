"""Studies with a budget of device time: the time of all workers, and a raised budget."""

import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState, create_trial
from support.worker_process import (
    begin,
    die_at,
    evaluate,
    finish,
    make_and_run,
    note,
    notes,
    result,
    start_process,
    study,
    wait_for,
    worker_on,
)

from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.outcome import Outcome
from hpo.study.checkpoints.keep_best import keep_best_checkpoints
from hpo.study.claims.budget import DeviceClock, StudyBudget
from hpo.study.claims.ending import NOT_PROMOTED
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import RunSummary
from hpo.study.running.worker import WorkerOptions
from hpo.study.sampling.forecast import Cost
from hpo.study.sampling.promotion import PAUSED_ATTR, RUNGS_ATTR, Promotion, Standings, promotion_of
from hpo.study.store.schema import claims, evaluations
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import BUDGET_SPENT, create_or_resume_study

SECONDS = 10.0
EVALUATION = 0.15  # seconds between two evaluations of a trial
PRUNERS = ({"name": "none"}, {"name": "promote", "starts": 0.1, "keep": 1})


def config_of(pruner: dict[str, Any], seconds: float = SECONDS) -> StudyConfig:
    values = {"n_trials": 1000, "pruner": pruner, "budget": {"hours": seconds / 3600}}
    return study(**values)  # type: ignore[arg-type]


def work(url: str, log: Path, kill_at: int = 0) -> RunSummary:
    """Be a worker whose trials have ten evaluations; it dies at its `kill_at`-th report."""
    config = config_of(PRUNERS[0])
    die_at("evaluation reported" if kill_at else "", kill_at)

    def train(trial: optuna.trial.Trial, lease: Lease) -> Any:
        suggest(config.search_space, trial)
        lease.store_params()
        for index in range(1, 11):
            time.sleep(EVALUATION)
            note(log, number=trial.number)
            evaluate(storage, trial, index, index / 100)
            if index < 10 and lease.is_budget_spent():
                return result("paused", reason="spent")
        return result("complete", values=(0.1,))

    with open_storage(url) as storage:
        return make_and_run(config, storage, train, WorkerOptions(poll_seconds=0.05))


def test_four_workers_spend_the_budget(storage_url: str, tmp_path: Path) -> None:
    """Two are killed and one joins late."""
    log = tmp_path / "log"
    first = [start_process(work, storage_url, log, kill_at) for kill_at in (0, 2, 3)]
    wait_for(log.exists)
    late = start_process(work, storage_url, log)
    for process in first:
        process.join(120)
    finish(late)
    assert [process.exitcode for process in first] == [0, -signal.SIGKILL, -signal.SIGKILL]
    with open_storage(storage_url) as storage:
        record = read_study(storage, "tiny")
    assert {trial.state for trial in record.trials} <= {"COMPLETE", "PRUNED", "FAIL"}
    failed = [trial for trial in record.trials if trial.state == "FAIL"]
    assert record.counts["done"] == len(record.trials) - len(failed)
    assert record.counts["done"] == sum(record.counts.values()) < 200, "every trial has ended"
    assert any(trial.state == "COMPLETE" for trial in record.trials)
    assert len(notes(log)) * EVALUATION <= SECONDS + 4 * EVALUATION
    assert sum(record.spent.values()) >= SECONDS / 2, "the budget is used"
    assert work(storage_url, log).outcomes == {}, "nothing is left to do"


def test_each_device_of_a_trial_counts_and_a_shared_one_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [7.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    alone, shared = DeviceClock(before=5.0), DeviceClock(before=0.0)
    monkeypatch.setenv("WORLD_SIZE", "8")
    ranks = DeviceClock(before=0.0)
    shared.num_sharing = ranks.num_sharing = 2
    for now[0] in (17.0, 37.0, 37.0):
        seconds = [clock.seconds() for clock in (alone, shared, ranks)]
    assert seconds == [35.0, 15.0, 120.0]


def test_time_of_all_workers_of_a_trial_is_spent(storage: Storage) -> None:
    """A continued trial adds to the time of its earlier workers, at each heartbeat and at its end."""
    config, budget = config_of(PRUNERS[0], 10_000.0), StudyBudget("tiny")
    with worker_on(storage, config, budget=budget) as worker:
        for total in (3000.0, 6000.0, 9000.0):
            lease, _ = begin(worker)
            assert lease.number == 0
            lease.clock._last -= 3000.0
            lease._started -= 3000.0
            if total == 3000.0:
                worker._beat_once()
            assert lease.active_seconds == pytest.approx(total, abs=100.0)
            worker.record_outcome(lease, result("complete" if total == 9000.0 else "preempted"))
            assert storage.read(budget.left) == pytest.approx(10_000.0 - total, abs=100.0)


def frozen(number: int, state: TrialState, **values: Any) -> FrozenTrial:
    trial = create_trial(state=state, **values)
    trial.number = number
    return trial


def started(number: int) -> FrozenTrial:
    attrs = {PAUSED_ATTR: 0.1, RUNGS_ATTR: {"0.1": {"values": [float(number)]}}}
    return frozen(number, TrialState.RUNNING, user_attrs=attrs, intermediate_values={1: float(number)})


def insert(storage: Storage, table: sa.Table, **values: Any) -> None:
    storage.write(lambda it: it.execute(sa.insert(table).values(**values)))


def test_cost_and_rest_of_a_study_count_its_own_trials(storage: Storage) -> None:
    """A complete trial took 10 s, of them 6 s of training. One runs for 4 s, and one waits."""
    create_or_resume_study(storage, config_of(PRUNERS[0], 45.0))
    for name, factor in (("tiny", 1.0), ("other", 3.0)):
        for number, seconds, active in ((0, 10.0, 5.0), (1, 4.0, 4.0)):
            ids = {"study": name, "trial_number": number}
            times = {"device_seconds": factor * seconds, "active_seconds": factor * active}
            insert(storage, claims, **ids, **times)
            for step, trained in ((1, 1.0), (2, 3.0)):
                insert(storage, evaluations, **ids, step=step, epoch=1.0, metrics="{}", seconds=trained)
    budget = StudyBudget("tiny", Promotion((0.5,), 2, 1, ("maximize",), num_trials=8))
    budget.add_ended(frozen(0, TrialState.COMPLETE, value=0.5))
    assert storage.read(lambda it: budget._cost(it, [])) == Cost(run_seconds=4.0, training_seconds=6.0)
    assert storage.read(budget.left) == 45.0 - 14.0
    budget.promotion = None
    running = [frozen(1, TrialState.RUNNING), frozen(2, TrialState.RUNNING)]
    rest = storage.read(lambda it: budget.forecast(it, (), running, 1, 9))
    assert (rest.num_new, rest.stages[0].num_trials) == (0, 3), "4 s more of 35 s, for three trials of 10 s"
    create_or_resume_study(storage, config_of(PRUNERS[0], 50.0))
    assert storage.read(lambda it: budget.forecast(it, (), running, 1, 9)).num_new == 1
    assert storage.read(lambda it: StudyBudget("no").forecast(it, (), running, 1, 9)).num_new == 9


@pytest.mark.parametrize("num_trials", [999, 1000])
def test_times_of_many_trials(storage: Storage, num_trials: int) -> None:
    rows = [{"study": "tiny", "trial_number": n, "device_seconds": n} for n in range(num_trials + 1)]
    storage.write(lambda it: it.execute(sa.insert(claims), rows))
    trials = [frozen(number, TrialState.RUNNING) for number in range(num_trials)]
    found = storage.read(lambda it: StudyBudget("tiny")._rows(it, trials))
    assert found == {number: (number, number) for number in range(num_trials)}


@pytest.mark.parametrize(("spent", "is_spent"), [(99.5, False), (100.0, True)])
def test_budget_is_spent_at_its_last_second(storage: Storage, spent: float, is_spent: bool) -> None:
    """No trial was trained, so the cost of another one is not known."""
    config = config_of(PRUNERS[0], 100.0)
    with worker_within(storage, config) as worker:
        lease, _ = begin(worker)
        worker.record_outcome(lease, result("oom"))
        insert(storage, claims, study="other", trial_number=0, device_seconds=100.0)
        mine = sa.update(claims).where(claims.c.study == "tiny").values(device_seconds=spent)
        storage.write(lambda it: it.execute(mine))
        assert lease.is_budget_spent() == is_spent
        assert (worker.claim() is None) == is_spent


@pytest.mark.parametrize(("n_trials", "reason"), [(2, NOT_PROMOTED), (3, BUDGET_SPENT)])
def test_paused_trial_ends_with_the_reason(storage: Storage, n_trials: int, reason: str) -> None:
    """Two starts and a continuation of 5 h each spend 15 of 16 h. Another start does not fit."""
    pruner = {"name": "promote", "starts": 0.5, "keep": 1}
    with worker_within(storage, study(n_trials, pruner=pruner, budget={"hours": 16})) as worker:
        for value, outcome in ((0.3, "paused"), (0.9, "paused"), (0.9, "complete")):
            lease, trial = begin(worker)
            evaluate(storage, trial, 1, value)
            if outcome == "paused":
                lease.pause(0.5, [value])
            lease.clock._last -= 5 * 3600.0
            worker.record_outcome(lease, result(outcome))
        assert worker.claim() is None
    paused, best = read_study(storage, "tiny").trials
    assert (paused.reason, best.outcome) == (reason, "complete")
    assert storage.trial_counts("tiny") == {"open": 0, "running": 0, "done": 2}


@pytest.mark.parametrize(
    ("seconds", "may_begin"), [(9 + 6 + 7 + 0.9, False), (9 + 6 + 7 + 1.1, True), (8, False)]
)
def test_no_trial_begins_at_the_cost_of_promoted_trials(
    storage: Storage, seconds: float, may_begin: bool
) -> None:
    """Nine starts took 9 s, so a whole trial takes 10: three continue to 0.3, and one of them to the end.

    The unsupported trial does not count.
    """
    create_or_resume_study(storage, config_of(PRUNERS[1], seconds))
    unsupported = create_trial(state=TrialState.PRUNED, user_attrs={"outcome": "unsupported"})
    paused = [*map(started, range(9))]
    promotion = Promotion((0.1, 0.3), 3, 1, ("maximize",), num_trials=1000)
    standings = Standings(promotion)
    rungs = standings.rungs(paused, lambda _: True)
    for number in range(9):
        insert(storage, claims, study="tiny", trial_number=number, device_seconds=1.0)
    budget = StudyBudget("tiny", promotion)
    budget.add_ended(unsupported)
    assert (storage.read(lambda it: budget.forecast(it, rungs, paused, 0, 9)).num_new > 0) == may_begin


def config_with(hours: float | None) -> StudyConfig:
    return study(50, pruner=PRUNERS[1], **({} if hours is None else {"budget": {"hours": hours}}))


def worker_within(storage: Storage, config: StudyConfig) -> Any:
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    budget = StudyBudget(config.name, promotion) if config.budget else None
    return worker_on(storage, config, promotion=promotion, budget=budget)


@pytest.fixture
def url(storage: Storage) -> str:
    """A study with a spent budget: trial 0 paused, and trial 1 stopped after an evaluation."""
    with worker_within(storage, config_with(1.0)) as worker:
        for number in (0, 1):
            lease, trial = begin(worker)
            trial.suggest_float("x", 0.0, 1.0)
            lease.store_params()
            evaluate(storage, trial, 1, 0.5 + number)
            if number == 0:
                lease.pause(0.1, [0.5])
            worker.record_outcome(lease, result("paused", reason=BUDGET_SPENT))
        storage.write(lambda it: it.execute(sa.update(claims).values(device_seconds=3600.0)))
        assert worker.claim() is None
    return storage.url


@pytest.mark.parametrize("hours", [9.0, None])
def test_trials_continue_after_a_budget_is_raised(url: str, hours: float | None, tmp_path: Path) -> None:
    with open_storage(url) as storage:
        assert storage.is_finished("tiny")
        trials = read_study(storage, "tiny").trials
        assert [(trial.state, trial.reason) for trial in trials] == [("PRUNED", BUDGET_SPENT)] * 2
        for number in (0, 1):
            (tmp_path / f"trial-{number:05d}").mkdir()
        keep_best_checkpoints(storage.load_study("tiny"), tmp_path, 0)
        assert len([*tmp_path.glob("trial-*")]) == 2, "they may continue"
    with open_storage(url) as storage:
        config = config_with(hours)
        create_or_resume_study(storage, config)
        record = read_study(storage, "tiny")
        assert [trial.outcome for trial in record.trials] == [Outcome.PAUSED, Outcome.PREEMPTED]
        assert [len(trial.evaluations) for trial in record.trials] == [1, 1], "each keeps its curve"
        assert record.counts == {"open": 49, "running": 0, "done": 0, "paused": 1}
        with worker_within(storage, config) as worker:
            lease, trial = begin(worker)
            assert trial.number == 1, "the stopped trial continues"
            evaluate(storage, trial, 2, 0.8)
            worker.record_outcome(lease, result("complete", values=(0.9,)))
        (_, complete) = read_study(storage, "tiny").trials
        assert complete.values == (0.9,)
        assert len(complete.evaluations) == 2
