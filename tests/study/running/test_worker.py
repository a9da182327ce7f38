from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, distribution_to_json
from support.tiny import CPU
from support.worker_process import make_and_run, result, study

from hpo.config.search_space import suggest
from hpo.errors import DataError
from hpo.outcome import Outcome
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running import worker as worker_module
from hpo.study.running.stopping import Stop
from hpo.study.running.trial_runner import TrialRunner
from hpo.study.store import optuna_internals
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study
from hpo.trial.telemetry import TrialResult


def complete(trial: optuna.trial.Trial, _lease: Lease) -> Any:
    suggest(study().search_space, trial)
    return result("complete")


def test_pruner_is_that_of_the_study(storage: Storage) -> None:
    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        pruners.append(type(trial.study.pruner))
        return complete(trial, lease)

    pruners: list[type] = []
    make_and_run(study(1, pruner={"name": "median"}), storage, execute)
    assert pruners == [optuna.pruners.MedianPruner]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"learning_rate": 5.0}, "learning_rate=5 is outside 1e-05 to 0.001."),
        ({"learning_rate": "fast"}, "learning_rate=fast must be a number."),
        ({"fp_precision": "tf32"}, "fp_precision=tf32 is none of its choices, which are fp32, bf16, fp16."),
        ({"lr": 1e-4}, "The study does not search `lr`. Did you mean `learning_rate`?"),
    ],
)
def test_enqueued_trial_that_no_worker_can_run_ends_once_and_takes_no_place(
    storage: Storage, params: dict[str, Any], reason: str
) -> None:
    create_or_resume_study(storage, study(2)).enqueue_trial(params)
    assert make_and_run(study(2), storage, complete).outcomes == {"complete": 2}
    refused, *others = read_study(storage, "tiny").trials
    assert (refused.state, refused.outcome) == ("FAIL", "failed")
    assert reason in refused.reason
    assert len(others) == 2


def test_a_trial_that_was_stored_with_another_encoder_never_runs_with_it(storage: Storage) -> None:
    """Whoever can write to the database would choose which folder of the worker is read as a model."""
    encoders = {"type": "categorical", "choices": ["minilm", "prajjwal1/bert-tiny"]}
    config, stop = study(1, search_space={"encoder": encoders}, max_retries=1), threading.Event()
    create_or_resume_study(storage, config)
    make_and_run(config, storage, lambda *_: stop.set() or result("preempted"), stop=stop)
    other = distribution_to_json(CategoricalDistribution(["/private", "/model"]))
    with storage.engine.begin() as connection:
        row = {"trial_id": 1, "param_name": "encoder", "param_value": 0.0, "distribution_json": other}
        connection.execute(sa.insert(optuna_internals.params).values(row))
    seen = []

    def execute(trial: optuna.trial.Trial, _lease: Lease) -> Any:
        seen.append(suggest(config.search_space, trial))
        return result("complete")

    assert make_and_run(config, storage, execute).outcomes == {"failed": 1}
    assert seen == []
    begun, retried = read_study(storage, "tiny").trials
    assert "does not support dynamic value space" in begun.reason
    assert "encoder=/private is none of" in retried.reason


def test_bug_in_a_trial_fails_it_alone(storage: Storage) -> None:
    def execute(trial: optuna.trial.Trial, _lease: Lease) -> Any:
        if trial.number == 0:
            raise ZeroDivisionError("not now")
        return complete(trial, _lease)

    assert make_and_run(study(2), storage, execute).outcomes == {"failed": 1, "complete": 2}
    failed, retried, _ = read_study(storage, "tiny").trials
    assert (failed.outcome, failed.reason) == ("failed", "ZeroDivisionError: not now")
    assert "ZeroDivisionError" in failed.attributes["traceback"]
    assert retried.attributes["retry_of"] == 0


def test_what_concerns_the_whole_study_is_raised(storage: Storage) -> None:
    def execute(_trial: optuna.trial.Trial, _lease: Lease) -> Any:
        raise DataError("the data is gone")

    with pytest.raises(DataError, match="the data is gone"):
        make_and_run(study(2), storage, execute)
    assert read_study(storage, "tiny").counts == {"open": 2, "running": 0, "done": 0}
    assert make_and_run(study(2), storage, complete).outcomes == {"complete": 2}
    assert len(read_study(storage, "tiny").trials) == 2


def test_timeout_starts_no_further_trial(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: clock[0])

    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        clock[0] += 40.0
        return complete(trial, lease)

    summary = make_and_run(study(9, timeout=100.0), storage, execute)
    assert (summary.ended, summary.outcomes, summary.exit_code) == ("timeout", {"complete": 3}, 0)


def test_lost_lease_stores_nothing_and_goes_on_with_the_next(storage: Storage) -> None:
    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        if trial.number == 0 and not lost:
            lost.append(trial.number)
            lease.lost.set()  # what the heartbeat does
            lease.check()
        return complete(trial, lease)

    lost: list[int] = []
    assert make_and_run(study(2), storage, execute).outcomes == {"complete": 2}
    assert lost == [0]


@pytest.mark.parametrize(("start", "end"), [(False, False), (True, True), (False, True), (True, False)])
def test_trial_knows_of_other_workers_on_its_device(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, start: bool, end: bool
) -> None:
    """Who they are is in test_workers.py."""

    def run(*_: Any, shared_device: bool, **__: Any) -> TrialResult:
        monkeypatch.setattr(storage, "has_other_workers_on", lambda _: end)
        telemetry = {"device": {"name": "x", "shared": shared_device}}
        return TrialResult(Outcome.COMPLETE, values=(0.5,), telemetry=telemetry)

    config = study(1)
    executor: Any = SimpleNamespace(study=config, device=CPU, trial_folder=lambda *_: Path(), run=run)
    create_or_resume_study(storage, config)
    monkeypatch.setattr(storage, "has_other_workers_on", lambda _: start)
    make_and_run(config, storage, TrialRunner(executor, storage, Stop()))
    found = read_study(storage, "tiny").trials[0].telemetry["device"]
    assert found == {"name": "x", "shared": start or end}
