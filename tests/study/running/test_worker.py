"""A worker: its trials, their pauses, failures and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
from hpo.config.study_config import StudyConfig
from hpo.errors import DataError, Paused
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running import worker as worker_module
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import TrialRunner
from hpo.study.sampling.promotion import PAUSED_ATTR
from hpo.study.store import optuna_internals
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study
from hpo.training.evaluate import Evaluation


def complete(trial: optuna.trial.Trial, _lease: Lease) -> Any:
    suggest(study().search_space, trial)
    return result("complete")


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"learning_rate": 5.0}, "learning_rate=5 is outside 1e-05 to 0.001."),
        ({"learning_rate": "fast"}, "learning_rate=fast must be a number."),
        ({"fp_precision": "tf32"}, "fp_precision=tf32 is none of its choices, which are fp32, bf16, fp16."),
        ({"lr": 1e-4}, "The study does not search `lr`. Did you mean `learning_rate`?"),
    ],
)
def test_invalid_enqueued_trial_fails_in_addition_to_the_others(
    storage: Storage, params: dict[str, Any], reason: str
) -> None:
    create_or_resume_study(storage, study(2)).enqueue_trial(params)
    assert make_and_run(study(2), storage, complete).outcomes == {"complete": 2}
    refused, *others = read_study(storage, "tiny").trials
    assert (refused.state, refused.outcome, len(others)) == ("FAIL", "failed", 2)
    assert reason in refused.reason


def test_encoder_planted_in_the_database_never_runs(storage: Storage) -> None:
    """A writer to the database would choose the folder of the worker to read as a model."""
    encoders = {"type": "categorical", "choices": ["minilm", "prajjwal1/bert-tiny"]}
    config, stop = study(1, search_space={"encoder": encoders}, max_retries=1), threading.Event()
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


def test_bug_fails_its_trial_alone(storage: Storage) -> None:
    def execute(trial: optuna.trial.Trial, _lease: Lease) -> Any:
        if trial.number == 0:
            raise ZeroDivisionError("not now")
        return complete(trial, _lease)

    assert make_and_run(study(2), storage, execute).outcomes == {"failed": 1, "complete": 2}
    failed, retried, _ = read_study(storage, "tiny").trials
    assert (failed.outcome, failed.reason) == ("failed", "ZeroDivisionError: not now")
    assert "ZeroDivisionError" in failed.attributes["traceback"]
    assert retried.attributes["retry_of"] == 0


def test_error_of_the_study_is_raised_and_its_trial_stays_open(storage: Storage) -> None:
    def execute(_trial: optuna.trial.Trial, _lease: Lease) -> Any:
        raise DataError("the data is gone")

    with pytest.raises(DataError, match="the data is gone"):
        make_and_run(study(2), storage, execute)
    assert read_study(storage, "tiny").counts == {"open": 2, "running": 0, "done": 0}


def test_timeout_starts_no_further_trial(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: clock[0])

    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        clock[0] += 40.0
        return complete(trial, lease)

    summary = make_and_run(study(9, timeout=100.0), storage, execute)
    assert (summary.ended, summary.outcomes, summary.exit_code) == ("timeout", {"complete": 3}, 0)


# Trials of an executor


def executor_of(config: StudyConfig, folder: Path, run: Callable[..., Any] = complete) -> Any:
    return SimpleNamespace(
        study=config,
        device=CPU,
        amp=config.amp,
        fingerprint="x",
        trial_folder=lambda _token, number: folder / "checkpoints" / str(number),
        run=run,
    )


def scored(index: int, budget_used: float, values: tuple[float | None, ...], broken: str = "") -> Any:
    return Evaluation(
        step=index,
        epoch=1.0,
        budget_used=budget_used,
        seconds=1.0,
        metrics={},
        decisions={},
        examples_per_second=None,
        train_loss=0.5,
        index=index,
        rates={},
        values=values,  # type: ignore[arg-type]
        ends_trial=broken,
    )


@pytest.mark.parametrize(
    ("values", "broken", "paused_at"),
    [
        ([0.5, 0.6, 0.7], "", 0.2),
        ([0.5, None, 0.7], "", 0.2),
        ([0.5, float("nan"), float("inf")], "", None),
        ([0.5, 0.6], "a limit", None),  # it ends at the second evaluation
    ],
)
def test_trial_pauses_at_a_rung_with_a_finite_value(
    storage: Storage, tmp_path: Path, values: list[float | None], broken: str, paused_at: int | None
) -> None:
    config, stop = study(3, pruner={"name": "promote", "starts": 0.2}), Stop()

    def run(_params: Any, _folder: Path, _key: str, callbacks: Any, **_: Any) -> Any:
        stop.set("enough")
        for index, value in enumerate(values, 1):
            try:
                callbacks.on_evaluation(scored(index, index / 10, (value,), broken))
            except Paused:
                return result("paused", telemetry={"device": {}})
        return result("pruned" if broken else "complete", telemetry={"device": {}})

    create_or_resume_study(storage, config)
    make_and_run(config, storage, TrialRunner(executor_of(config, tmp_path, run), storage, stop), stop=stop)
    [trial] = storage.load_study(config.name).trials
    assert trial.user_attrs.get(PAUSED_ATTR) == paused_at
    assert storage.trial_counts(config.name).get("paused", 0) == (paused_at is not None)


# The worker of an open study
