"""A worker from its opened study to its end: trials, pauses, failures and the final evaluation."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, distribution_to_json
from support.detailed_documents import document, task_document
from support.tiny import CPU
from support.worker_process import begin, evaluate, make_and_run, result, run_trials, scored, study, worker_on

from hpo.config.resolved_study import ResolvedStudy, resolve_study
from hpo.config.search_space import suggest
from hpo.errors import DataError, DeviceLostError, InputError, Paused, RunError
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.running import final_evaluation
from hpo.study.running import open_study as module
from hpo.study.running import worker as worker_module
from hpo.study.running.final_evaluation import evaluate_best
from hpo.study.running.open_study import check_precisions, open_study
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import TrialRunner
from hpo.study.sampling.promotion import PAUSED_ATTR
from hpo.study.store import optuna_internals
from hpo.study.store.schema import claims
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study


def complete(trial: optuna.trial.Trial, _lease: Lease) -> Any:
    suggest(study().search_space, trial)
    return result("complete")


def test_encoder_planted_in_the_database_never_runs(storage: Storage) -> None:
    """A writer to the database would choose the folder of the worker to read as a model."""
    encoders = {"type": "categorical", "choices": ["minilm", "prajjwal1/bert-tiny"]}
    config, stop = study(1, search_space={"encoder": encoders}, max_retries=1), threading.Event()
    make_and_run(config, storage, lambda *_: stop.set() or result("preempted"), stop=stop)
    other = distribution_to_json(CategoricalDistribution(["/private", "/model"]))
    row = {"trial_id": 1, "param_name": "encoder", "param_value": 0.0, "distribution_json": other}
    storage.write(lambda it: it.execute(sa.insert(optuna_internals.params).values(row)))
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
                callbacks.on_evaluation(scored(index, index, index / 10, (value,), broken))
            except Paused:
                return result("paused", telemetry={"device": {}})
        return result("pruned" if broken else "complete", telemetry={"device": {}})

    create_or_resume_study(storage, config)
    folder = lambda _token, number: tmp_path / str(number)  # noqa: E731
    executor: Any = SimpleNamespace(study=config, device=CPU, trial_folder=folder, run=run)
    make_and_run(config, storage, TrialRunner(executor, storage, stop), stop=stop)
    [trial] = storage.load_study(config.name).trials
    assert trial.user_attrs.get(PAUSED_ATTR) == paused_at
    assert storage.trial_counts(config.name).get("paused", 0) == (paused_at is not None)


DOCUMENT = document({"size": task_document("regression", {})})


class Evaluating:
    """A finished study of three trials, the second the best, with predictions of `split_predictions`."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage, self.folder, self.stop = storage, folder, threading.Event()
        self.evaluated: list[tuple[str, str]] = []  # folder of the checkpoint and split
        self.on_batch: Callable[[], None] = lambda: None
        values = (0.25, 0.75, 0.5)
        run_trials(storage, study(3), lambda trial: result("complete", values=(values[trial.number],)))

    def run(self) -> None:
        data = SimpleNamespace(splits=dict.fromkeys(("train", "validation", "test")))
        executor: Any = SimpleNamespace(study=study(), dataset=data, device=CPU)
        evaluate_best(executor, self.storage, lambda n: self.folder / f"trial-{n}", self.stop, None)

    def split_predictions(self, _: Any, folder: Path, params: Any, split: str, on_batch: Any) -> Any:
        assert params == read_study(self.storage, "tiny").trials[1].params
        self.evaluated.append((folder.name, split))
        self.on_batch()
        on_batch(0.5)
        return SimpleNamespace(as_json=lambda: DOCUMENT)


@pytest.fixture
def evaluating(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluating:
    found = Evaluating(storage, tmp_path)
    monkeypatch.setattr(final_evaluation, "split_predictions", found.split_predictions)
    monkeypatch.setattr(final_evaluation, "evaluate_predictions", lambda predicted, **_: predicted)
    return found


def test_best_trial_is_evaluated_once(evaluating: Evaluating) -> None:
    with final_evaluation._held(evaluating.folder / "evaluation.lock"):
        evaluating.run()
    assert evaluating.evaluated == [], "another worker of the folder evaluates"
    evaluating.run()
    evaluating.run()
    assert evaluating.evaluated == [("trial-1", "test")]
    trials = read_study(evaluating.storage, "tiny").trials
    assert [trial.detailed for trial in trials] == [{}, {"test": DOCUMENT}, {}]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "told to stop."),
        (RunError("there is no checkpoint."), "there is no checkpoint."),
        (ZeroDivisionError("of ours"), "ZeroDivisionError: of ours"),
        (DeviceLostError("the GPU is lost."), "the GPU is lost."),
    ],
)
def test_stop_or_error_of_the_evaluation_is_only_logged(
    evaluating: Evaluating, caplog: pytest.LogCaptureFixture, error: Exception | None, text: str
) -> None:
    def end() -> None:
        evaluating.stop.set()
        if error is not None:
            raise error

    caplog.set_level(logging.INFO, "hpo")
    evaluating.on_batch = end
    evaluating.run()
    assert not any(trial.detailed for trial in read_study(evaluating.storage, "tiny").trials)
    assert f"The best trial is not evaluated in detail: {text}" in caplog.messages


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The stand-ins for executors of studies, in the order of their creation."""
    made: list[Any] = []

    def build(resolved: ResolvedStudy, *_: Any, checks_values: bool) -> Any:
        data = SimpleNamespace(splits={"train": range(48), "validation": range(24)})
        one = mock.Mock(resolved=resolved, study=resolved.config, device=resolved.device, dataset=data)
        one.amp, one.checks_values = resolved.amp, checks_values
        made.append(one)
        return one

    monkeypatch.setattr(module, "build_executor", build)
    return made


@pytest.mark.parametrize("begun", ["no", "checkpointed", "ended"])
def test_study_is_checked_until_a_trial_has_trained(
    storage: Storage, tmp_path: Path, built: list[Any], begun: str
) -> None:
    create_or_resume_study(storage, study(1))
    if begun == "checkpointed":
        with worker_on(storage, study(1)) as worker:
            begin(worker)
        storage.write(lambda it: it.execute(sa.update(claims).values(saved_step=40)))
    if begun == "ended":
        run_trials(storage, study(1), lambda trial: evaluate(storage, trial))
    with open_study(study(2), storage.url, tmp_path) as opened:
        assert opened.stored.counts["open"] == (2 if begun == "no" else 1)
    assert [opened.executor] == built
    assert (built[0].check_study.call_count, built[0].checks_values) == (begun == "no", begun == "no")


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("on_unsupported", ["skip", "prune", "fallback", "fail"])
def test_only_skip_leaves_out_searched_precisions(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_unsupported: str
) -> None:
    monkeypatch.setattr(module, "probe_device", lambda _: CPU)
    space = {"fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]}}
    config = study(search_space=space, amp={"on_unsupported": on_unsupported})
    with open_study(config, sqlite_url, tmp_path) as opened:
        assert opened.left_out.keys() == ({"bf16"} if on_unsupported == "skip" else set())
        assert opened.lacking.keys() == {"bf16"}


@pytest.mark.parametrize("on_unsupported", ["skip", "prune", "fail", "fallback"])
@pytest.mark.parametrize(("preset", "precision"), [("advanced", "fp16"), ("ultra", "bf16")])
def test_precision_of_a_preset_must_run_here(on_unsupported: str, preset: str, precision: str) -> None:
    amp = {"preset": preset, "on_unsupported": on_unsupported}
    preset_study = resolve_study(study(search_space={}, amp=amp), CPU)
    if on_unsupported == "fallback":
        assert check_precisions(preset_study).keys() == {precision}
    else:
        with pytest.raises(InputError, match=f"it runs none of {precision}"):
            check_precisions(preset_study)
    fixed = study(search_space={}, training={"fp_precision": "fp32"}, amp=amp)
    assert check_precisions(resolve_study(fixed, CPU)) == {}
