"""Decisions of a worker: concurrent changes, dead workers, damaged rows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa
from optuna.trial import create_trial
from support.worker_process import begin, change_worker, result, study, worker_on

from hpo.errors import StorageError
from hpo.study.claims import leases, snapshot
from hpo.study.claims.ending import end_unfinished
from hpo.study.claims.leases import WorkerLease
from hpo.study.claims.snapshot import Runnable, Snapshot, Watch
from hpo.study.reading.reader import read_study
from hpo.study.sampling.promotion import PAUSED_ATTR, RESUMED_ATTR, RUNGS_ATTR, promotion_of
from hpo.study.store.lifecycle import set_state
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

PRECISIONS = ("fp32", "fp16")
SPACE = {"fp_precision": {"type": "categorical", "choices": list(PRECISIONS)}}
PRUNER = {"name": "promote", "starts": 0.1, "keep": 1, "reduction_factor": 2}
CONFIG = study(8, search_space=SPACE, pruner=PRUNER)
PROMOTION = promotion_of(CONFIG.pruner, CONFIG.directions, CONFIG.num_trials)
RUNG = PROMOTION.rungs[0] if PROMOTION else 0.0


pytestmark = pytest.mark.usefixtures("looks_for_dead_at_each_claim")


def promoting(storage: Storage, **options: Any) -> WorkerLease:
    return worker_on(storage, CONFIG, promotion=PROMOTION, **options)


def pause(storage: Storage, *values: float | None, precision: str = "fp32") -> None:
    """Pause new trials at the first rung with these values. None: the trial breaks."""
    config = study(8, search_space=SPACE, pruner={**PRUNER, "reduction_factor": 99})  # none continues
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    with worker_on(storage, CONFIG, promotion=promotion) as worker:
        for value in values:
            storage.load_study(CONFIG.name).enqueue_trial({"fp_precision": precision})
            lease, trial = begin(worker)
            assert trial.suggest_categorical("fp_precision", PRECISIONS) == precision
            if value is not None:
                lease.pause(RUNG, [value])
            worker.record_outcome(lease, result("nonfinite" if value is None else "paused"))


@pytest.fixture
def change_after_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Make a change between the next reading of the trials and the reading of their claims."""
    read = snapshot.read_trials

    def install(change: Callable[[], Any]) -> None:
        def read_and_change(opened: Any) -> Any:
            monkeypatch.setattr(snapshot, "read_trials", read)
            trials = read(opened)
            change()
            return trials

        monkeypatch.setattr(snapshot, "read_trials", read_and_change)

    return install


def test_concurrently_ended_trial_does_not_run_again(storage: Storage, change_after_reading: Any) -> None:
    with worker_on(storage, study(1)) as first, worker_on(storage, study(1)) as other:
        lease, _ = begin(first)
        change_after_reading(lambda: first.record_outcome(lease, result("complete")))
        assert other.claim() is None
        assert not other.left
    assert storage.trial_counts("tiny") == {"open": 0, "running": 0, "done": 1}


def test_one_of_two_workers_continues_a_paused_trial(storage: Storage, change_after_reading: Any) -> None:
    pause(storage, 0.3, 0.9)
    claimed = []
    with promoting(storage) as first, promoting(storage) as other:
        change_after_reading(lambda: claimed.append(begin(first)[0].number))
        claimed.append(begin(other)[0].number)
    assert claimed == [1, 2], "the better one continues, and the other worker begins a new trial"


@pytest.mark.parametrize("end", ["killed", "preempted", "asked again"])
def test_promoted_trial_without_a_worker_continues_first(storage: Storage, end: str) -> None:
    """It is no longer paused, and still counts as promoted."""
    pause(storage, 0.3, 0.9)
    with promoting(storage) as first:
        lease, trial = begin(first)
        assert (trial.number, trial.user_attrs["resumed_at"]) == (1, RUNG)
        if end == "preempted":
            first.record_outcome(lease, result("preempted"))
        if end == "killed":
            change_worker(storage, first, process_start="1")
        with promoting(storage) as other:
            again, trial = begin(first if end == "asked again" else other)
            assert (trial.number, trial.user_attrs["resumed_at"]) == (1, RUNG)
            assert again.row.deaths == (end == "killed")
            assert begin(other if end == "asked again" else first)[0].number == 2


def test_death_between_pause_and_checkpoint_does_not_count(storage: Storage) -> None:
    with promoting(storage) as dead, promoting(storage) as other:
        begin(dead)[0].pause(RUNG, [0.5])
        change_worker(storage, dead, process_start="1")
        assert [begin(other)[0].number for _ in range(2)] == [1, 1]
        [trial, _] = read_study(storage, "tiny").trials
        assert trial.outcome == "paused"


def test_ended_paused_trial_has_the_attributes_of_its_last_run(storage: Storage) -> None:
    with worker_on(storage, CONFIG.with_values(n_trials=1), promotion=PROMOTION) as worker:
        for rung in (RUNG, 2 * RUNG):
            lease, trial = begin(worker)
            assert "telemetry" not in trial.user_attrs
            lease.pause(rung, [5 * rung])
            facts = {"headline": {"peak_memory_bytes": 7}, "telemetry": {"rung": rung}}
            worker.record_outcome(lease, result("paused", **facts))
    assert storage.trial_counts("tiny") == {"open": 0, "running": 0, "done": 0, "paused": 1}
    set_state(storage, "tiny", "cancelled")
    assert end_unfinished(storage, "tiny") == 1
    assert storage.is_finished("tiny")
    [trial] = storage.load_study("tiny").get_trials()
    assert (trial.state.name, trial.value) == ("PRUNED", 10 * RUNG)
    assert trial.user_attrs["peak_memory_bytes"] == 7
    assert trial.user_attrs["telemetry"] == {"rung": 2 * RUNG}
    assert trial.user_attrs["outcome_reason"] == "the study was cancelled"


# Rows of other programs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (PAUSED_ATTR, "soon"),
        (RESUMED_ATTR, None),
        (RUNGS_ATTR, {"now": {"values": [0.5], "constraints": {}}}),
        (RUNGS_ATTR, {"0.1": {"values": [0.5, 0.5], "constraints": {}}}),
    ],
)
def test_damaged_attribute_is_one_clear_error(storage: Storage, name: str, value: Any) -> None:
    with worker_on(storage, study(2)) as worker:
        lease, trial = begin(worker)
        worker.record_outcome(lease, result("preempted"))
        trial.set_user_attr(name, value)
        with pytest.raises(StorageError, match=f"`{name}` of trial 0 must be"):
            worker.claim()


def test_damaged_claim_is_one_clear_error(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    pause(storage, 0.3, 0.9)
    storage.write(lambda it: it.execute(sa.update(claims).values(paused_at=RUNG / 2)))
    monkeypatch.setattr(leases, "MAX_REFUSALS", 2)
    with promoting(storage) as worker:
        claim = mock.Mock(wraps=worker._claim)
        monkeypatch.setattr(worker, "_claim", claim)
        with pytest.raises(StorageError, match="row in hpo_claims does not fit"):
            worker.claim()
    assert claim.call_count == 3


def test_concurrently_begun_trial_is_unfinished(storage: Storage, change_after_reading: Any) -> None:
    with worker_on(storage, study(1)) as first, worker_on(storage, study(1)) as other:
        change_after_reading(lambda: begin(first))
        assert other.claim() is None
        assert other.left == [{}], "another worker has just begun the last trial"


@pytest.mark.parametrize("peer", ["dead", "without fp16", "able"])
def test_trials_wait_for_live_workers_with_their_precision(storage: Storage, peer: str) -> None:
    config = CONFIG.with_values(n_trials=4)
    only_fp32 = Runnable(PRECISIONS, frozenset({"fp16"}))
    pause(storage, 0.1, 0.2)
    pause(storage, 0.8, 0.9, precision="fp16")
    runnable = only_fp32 if peer == "without fp16" else Runnable(PRECISIONS)
    with (
        worker_on(storage, config, promotion=PROMOTION, runnable=runnable) as first,
        worker_on(storage, config, promotion=PROMOTION, runnable=only_fp32) as other,
    ):
        if peer == "dead":
            change_worker(storage, first, process_start="1")
        if peer == "able":
            assert other.claim() is None
            assert [*other.left] == [{"fp_precision": "fp16"}] * 2
        else:
            assert begin(other)[0].number == 1


def test_trial_of_a_broken_precision_continues_last(storage: Storage) -> None:
    pause(storage, 0.3)
    pause(storage, 0.9, None, None, None, precision="fp16")
    with promoting(storage) as worker:
        assert begin(worker)[0].number == 0


@pytest.mark.parametrize(
    ("num_others", "checks"), [(0, []), (8, [5.0, 6.0, 7.0]), (16, [5.0, 7.0])], ids=["0", "8", "16"]
)
def test_many_workers_look_less_often_for_dead_ones(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, num_others: int, checks: list[float]
) -> None:
    clock, looked = [0.0], list[float]()

    def live_workers(*_: Any) -> dict[str, Any]:
        looked.append(clock[0])
        return {"0": None}

    monkeypatch.setattr(snapshot, "DEATH_CHECK_SECONDS", 1.0)
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(storage, "live_workers", live_workers)
    watch = Watch(storage, create_or_resume_study(storage, CONFIG), None, None)
    others = {*map(str, range(num_others))}
    for clock[0] in (5.0, 5.5, 6.0, 6.5, 7.0):
        storage.read(lambda it: watch._check_for_dead(it, others))
    assert looked == checks
    assert watch._dead == others - {"0"}


@pytest.mark.parametrize(
    ("groups", "changes", "left"),
    [
        ("free promoted waiting paused", {}, "free promoted waiting"),
        ("running paused", {}, "running paused"),
        ("paused", {"num_unseen": 1}, "paused unseen"),
        ("paused", {"num_new": 1}, "new"),
        ("free promoted running waiting", {"is_spent": True}, "running"),
    ],
)
def test_trials_before_the_end_of_a_study(groups: str, changes: dict[str, Any], left: str) -> None:
    seen = Snapshot({}, {}, 0, new=[{"x": "new"}], is_spent=False)
    for name, value in {"num_unseen": 0, "num_new": 0, **changes}.items():
        setattr(seen, name, value)
    for group in groups.split():
        setattr(seen, group, [create_trial(value=0.0, system_attrs={"fixed_params": {"x": group}})])
    assert [params.get("x", "unseen") for params in seen.unfinished()] == left.split()


def test_device_lacks_precisions_of_unfinished_trials() -> None:
    runnable = Runnable(("fp32", "bf16", "fp16"), frozenset({"bf16", "fp16"}))
    assert runnable.lacks([{"fp_precision": "fp16"}, {"fp_precision": "fp32"}]) == ("fp16",)
    assert runnable.lacks([{}]) == ("bf16", "fp16"), "any precision may be suggested"


@pytest.mark.parametrize("pruner", [{"name": "none"}, {**PRUNER, "starts": 0.2}])
def test_trial_paused_under_an_earlier_pruner_continues(storage: Storage, pruner: dict[str, Any]) -> None:
    pause(storage, 0.3)
    config = study(8, search_space=SPACE, pruner=pruner)
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    with worker_on(storage, config, promotion=promotion) as worker:
        assert begin(worker)[0].trial.user_attrs[RESUMED_ATTR] == RUNG
