"""Studies with a budget of device time: the time spent by workers, also killed and late ones."""

from __future__ import annotations

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
from hpo.report.status import study_status
from hpo.study.claims.budget import DeviceClock, StudyBudget
from hpo.study.claims.leases import Lease, WorkerLease
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import RunSummary
from hpo.study.running.worker import WorkerOptions
from hpo.study.sampling.promotion import (
    PAUSED_ATTR,
    RUNGS_ATTR,
    Promotion,
    Standings,
)
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

SECONDS = 20.0
EVALUATION = 0.15
"""Seconds between two evaluations of a trial."""
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
    budget = study_status(record)["budget"]
    assert budget["spent_hours"] == pytest.approx(sum(budget["by_outcome"].values()))
    assert work(storage_url, log).outcomes == {}, "nothing is left to do"


def test_shared_device_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clocks = [DeviceClock(before=0.0), DeviceClock(before=5.0)]
    for clock in clocks:
        clock.num_sharing = 2
    for now[0] in (10.0, 30.0, 30.0):
        seconds = [clock.seconds() for clock in clocks]
    assert seconds == pytest.approx([15.0, 20.0])


def test_time_of_all_workers_of_a_trial_is_spent(storage: Storage) -> None:
    """A continued trial adds to the time of its earlier workers, at each heartbeat and at its end."""
    config, budget = config_of(PRUNERS[0], 100.0), StudyBudget("tiny")
    with worker_on(storage, config, budget=budget) as worker:
        for total in (30.0, 60.0, 90.0):
            lease, _ = begin(worker)
            assert lease.number == 0
            lease.clock._last -= 30.0
            if total == 30.0:
                worker._beat_once()
            worker.record_outcome(lease, result("complete" if total == 90.0 else "preempted"))
            assert storage.read(budget.left) == pytest.approx(100.0 - total, abs=5.0)


def started(number: int) -> FrozenTrial:
    attrs = {PAUSED_ATTR: 0.1, RUNGS_ATTR: {"0.1": {"values": [float(number)]}}}
    trial = create_trial(state=TrialState.RUNNING, user_attrs=attrs, intermediate_values={1: float(number)})
    trial.number = number
    return trial


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
    with storage.engine.begin() as connection:
        rows = [{"study": "tiny", "trial_number": number, "device_seconds": 1.0} for number in range(9)]
        connection.execute(sa.insert(claims), rows)
        budget = StudyBudget("tiny", promotion)
        budget.add_ended(unsupported)
        assert (budget.forecast(connection, rungs, paused, 0, 9).num_new > 0) == may_begin


def test_idle_workers_share_no_device(storage: Storage) -> None:
    config = config_of(PRUNERS[0])
    study_ = create_or_resume_study(storage, config)
    options = {"max_retries": 1, "device": "cpu", "budget": StudyBudget("tiny")}
    with WorkerLease(storage, study_, **options) as one, WorkerLease(storage, study_, **options) as other:
        lease = one.claim()
        assert lease is not None
        assert lease.clock.num_sharing == 1
        second = other.claim()
        assert second is not None
        assert second.clock.num_sharing == 2
