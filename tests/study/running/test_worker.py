"""A worker: its trials, their pauses, failures and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, distribution_to_json
from support.tiny import CPU, GPU
from support.worker_process import make_and_run, result, study

from hpo.config.limits import ENERGY
from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.errors import DataError, Paused
from hpo.outcome import Outcome, TrialResult
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running import worker as worker_module
from hpo.study.running.open_study import OpenStudy
from hpo.study.running.stopping import RunSummary, Stop
from hpo.study.running.supervisor import DeviceShare, WorkerProcesses
from hpo.study.running.worker import TrialRunner, run_study, with_shared_device
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.sampling.promotion import PAUSED_ATTR
from hpo.study.store import optuna_internals
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study, read_stored
from hpo.training.evaluate import Evaluation
from hpo.trial.compat import checked_on


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


def test_worker_without_its_lease_stores_nothing(storage: Storage) -> None:
    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        if trial.number == 0 and not lost:
            lost.append(trial.number)
            lease.lost.set()  # as the heartbeat does
            lease.check()
        return complete(trial, lease)

    lost: list[int] = []
    assert make_and_run(study(2), storage, execute).outcomes == {"complete": 2}
    assert lost == [0]


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


@pytest.mark.parametrize(("start", "end"), [(False, False), (True, True), (False, True), (True, False)])
def test_trial_records_other_workers_on_its_device(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bool, end: bool
) -> None:
    def run(*_: Any, shared_device: bool, **__: Any) -> TrialResult:
        monkeypatch.setattr(storage, "has_other_workers_on", lambda _: end)
        telemetry = {"device": {"name": "x", "shared": shared_device}}
        return TrialResult(Outcome.COMPLETE, values=(0.5,), telemetry=telemetry)

    create_or_resume_study(storage, study(1))
    monkeypatch.setattr(storage, "has_other_workers_on", lambda _: start)
    make_and_run(study(1), storage, TrialRunner(executor_of(study(1), tmp_path, run), storage, Stop()))
    found = read_study(storage, "tiny").trials[0].telemetry["device"]
    assert found == {"name": "x", "shared": start or end}


@pytest.mark.parametrize(
    ("named", "outcome", "values"), [((), "complete", (0.5,)), ((ENERGY,), "failed", None)]
)
def test_energy_is_unknown_when_another_worker_joins_the_gpu(
    named: tuple[str, ...], outcome: str, values: tuple[float, ...] | None
) -> None:
    telemetry = {"device": {"shared": False}, "throughput": {ENERGY: 2.0, "step_seconds_p50": 1.0}}
    before = TrialResult(Outcome.COMPLETE, "", (0.5,), {ENERGY: 2.0, "worker": "a"}, telemetry)
    after = with_shared_device(before, named)
    assert (after.outcome, after.values, after.headline) == (outcome, values, {"worker": "a"})
    assert after.telemetry["device"]["shared"]
    assert after.telemetry["throughput"] == {ENERGY: None, "step_seconds_p50": 1.0}
    assert "another worker joined this GPU" in after.telemetry["energy_missing"]
    assert ("Run one worker on each GPU" in after.reason) == bool(named)


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


def opened(storage: Storage, folder: Path, config: StudyConfig, **changes: Any) -> OpenStudy:
    create_or_resume_study(storage, config)
    stored = read_stored(storage, config.name)
    assert stored is not None
    study = OpenStudy(config, storage, folder, stored, {}, executor_of(config, folder))
    return replace(study, **changes)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options of `run_worker`. It ends at once, as the test's parameter."""
    options: dict[str, Any] = {}
    summary = RunSummary(getattr(request, "param", "stopped"))
    monkeypatch.setattr(worker_module, "run_worker", lambda *_, **of: options.update(of) or summary)
    return options


@pytest.mark.parametrize(("fraction", "gib"), [(0.25, 20), (None, 80)])
def test_sampler_knows_the_device_of_its_worker(
    storage: Storage, tmp_path: Path, given: dict[str, Any], fraction: float | None, gib: int
) -> None:
    study_here = opened(storage, tmp_path, study(1, amp={"memory_fraction": fraction}), lacking={"tf32": "x"})
    study_here.executor.device = GPU  # type: ignore[union-attr, misc]
    run_study(study_here)
    assert given["device"] == WorkerDevice("GPU-0", gib * 2**30, {"tf32": "x"}, GPU.kind, checked_on(GPU))


def test_study_without_executor_runs_in_worker_processes(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def run_workers(*args: Any) -> RunSummary:
        seen.extend(args)
        return RunSummary("elsewhere")

    monkeypatch.setattr(worker_module, "run_workers", run_workers)
    processes, stop = WorkerProcesses([DeviceShare(2)] * 2), Stop()
    study_here = opened(storage, tmp_path, study(1), executor=None, lacking={"bf16": "not native"})
    assert run_study(study_here, processes, stop=stop) == RunSummary("elsewhere", elsewhere=("bf16",))
    assert seen == [study(1), storage, tmp_path, processes, stop]


@pytest.mark.parametrize("given", ["finished", "stopped", "timeout", "elsewhere", "closed"], indirect=True)
@pytest.mark.parametrize("is_comparison", [False, True])
def test_best_trial_is_evaluated_when_a_search_has_finished(
    storage: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    given: dict[str, Any],
    is_comparison: bool,
) -> None:
    evaluated: list[str] = []
    monkeypatch.setattr(worker_module, "evaluate_best", lambda *_: evaluated.append("best"))
    study_here = opened(storage, tmp_path, study(1))
    if is_comparison:
        config = study_here.config.model_copy(update={"comparison": SimpleNamespace()})
        study_here = replace(study_here, config=config)
    ended = request.node.callspec.params["given"]
    assert run_study(study_here).ended == ended
    assert evaluated == (["best"] if ended == "finished" and not is_comparison else [])
    assert given["stop"].can_checkpoint is False
