from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from support.one_connection import one_connection
from support.worker_process import begin, evaluate, result, study, work, worker_on

from hpo.config.search_space import suggest
from hpo.errors import StorageError, StudyChangedError
from hpo.study.claims import lease as lease_module
from hpo.study.claims.ending import end_unfinished
from hpo.study.reading.overview import list_studies
from hpo.study.reading.reader import read_study
from hpo.study.store.copy import copy_study
from hpo.study.store.lifecycle import delete_study, set_state
from hpo.study.store.schema import EvaluationRow
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import bind_data, check_data, create_or_resume_study


def run_trials(storage: Storage, config: Any, *results: Any) -> optuna.Study:
    """Run one trial for each of `results`, and return the study."""
    with worker_on(storage, config, max_retries=config.max_retries) as worker:
        for trial_result in results:
            lease, trial = begin(worker)
            suggest(config.search_space, trial)
            worker.record_outcome(lease, trial_result)
    return storage.load_study(config.name)


def test_safe_changes_of_the_definition(storage: Storage) -> None:
    create_or_resume_study(storage, study(3, amp={"memory_fraction": 0.5}))
    changes: dict[str, Any] = {"sampler": {"name": "tpe"}, "timeout": 5.0, "device": "cpu"}
    create_or_resume_study(storage, study(4, amp={"memory_fraction": 0.25}, **changes))
    definition = read_study(storage, "tiny").definition
    assert (definition["timeout"], definition["n_trials"]) == (5.0, 4)
    create_or_resume_study(storage, study(4))
    assert read_study(storage, "tiny").definition["amp"]["memory_fraction"] is None


def test_first_worker_binds_the_data(storage: Storage) -> None:
    create_or_resume_study(storage, study(3))
    check_data(storage, "tiny", "any: none are bound")
    for _ in range(2):
        bind_data(storage, "tiny", "as they were")
    for function in (bind_data, check_data):
        with pytest.raises(StudyChangedError, match=r"data of the study `tiny` .*`hpo delete tiny`"):
            function(storage, "tiny", "edited")
    with pytest.raises(StorageError, match="There is no study"):
        bind_data(storage, "tinny", "as they were")


def test_n_trials_can_be_raised_and_lowered(storage: Storage) -> None:
    """Begun trials continue to their end."""
    run_trials(storage, study(4), result("complete"), result("failed", traceback="x"), result("preempted"))
    create_or_resume_study(storage, study(6))
    assert storage.trial_counts("tiny") == {"open": 4, "running": 1, "done": 1}
    create_or_resume_study(storage, study(1), resize=False)
    assert storage.trial_counts("tiny")["open"] == 4
    create_or_resume_study(storage, study(1))
    assert storage.trial_counts("tiny") == {"open": 0, "running": 1, "done": 1}
    run_trials(storage, study(1), result("complete"))
    assert storage.is_finished("tiny")
    assert len(read_study(storage, "tiny").trials) == 3


def test_outcome_becomes_optuna_state(storage: Storage) -> None:
    infeasible = (TrialState.PRUNED, {"feasible": 1.0})
    expected = {
        "complete": (TrialState.COMPLETE, {}),
        "pruned": (TrialState.PRUNED, {}),
        **dict.fromkeys(("nonfinite", "incompatible", "unsupported", "oom", "crashed"), infeasible),
        "failed": (TrialState.FAIL, {}),
        "preempted": (TrialState.RUNNING, {}),
    }
    results = [result(outcome, reason="why") for outcome in expected]
    trials = run_trials(storage, study(9), *results).trials
    assert [(trial.state, trial.constraints) for trial in trials] == list(expected.values())
    assert [trial.user_attrs.get("outcome", "preempted") for trial in trials] == list(expected)
    records = read_study(storage, "tiny").trials
    assert [record.outcome for record in records] == list(expected)
    # `failed` without a traceback is a decision: `amp.on_unsupported: fail`.
    assert not any("retry_of" in record.attributes for record in records)
    assert {record.reason for record in records[:-1]} == {"why"}
    for values in (None, (float("nan"),)):
        with pytest.raises(ValueError, match="finite values"):
            run_trials(storage, study(1, name="other"), result("complete", values=values))


def test_evaluations_are_stored_and_reported_once(storage: Storage) -> None:
    with worker_on(storage, study(1)) as worker:
        _, trial = begin(worker)
        metrics = {"score": 0.5, "task": {"f1_macro": np.float64(0.5), "loss": float("nan")}}
        rates = {"train_examples_per_second": 10.0, "train_tokens_per_second": 1300.0}
        more = {"epoch": 0.5, "seconds": 3.0, "metrics": metrics, **rates}
        assert evaluate(storage, trial, 1, 0.5, 40, **more) is False
        evaluate(storage, trial, 2, float("nan"), 80, metrics=metrics)
    stored, without = read_study(storage, "tiny").trials[0].evaluations
    metrics = {"score": 0.5, "task": {"f1_macro": 0.5, "loss": None}}
    assert stored == EvaluationRow(40, 0.5, 3.0, metrics, 10.0, 1300.0)
    assert without.train_tokens_per_second is None
    assert storage.load_study("tiny").trials[0].intermediate_values == {1: 0.5}


def test_evaluation_and_intermediate_value_are_stored_together(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker_on(storage, study(1)) as worker:
        _, trial = begin(worker)
        with monkeypatch.context() as patched:
            patched.setattr(lease_module, "set_intermediate_value", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                evaluate(storage, trial)
        assert read_study(storage, "tiny").trials[0].evaluations == []
        for value in (0.4, 0.6):  # a continued trial repeats the step
            evaluate(storage, trial, value=value)
        assert trial.study.trials[0].intermediate_values == {1: 0.6}
    with open_storage(storage.url) as other:
        assert other.load_study("tiny").trials[0].intermediate_values == {1: 0.6}


def copy(storage: Storage, folder: Path) -> None:
    with open_storage(f"sqlite:///{folder}/copy.db") as target:
        copy_study(storage, target, "tiny")


def join(storage: Storage, _: Path) -> None:
    with worker_on(storage, study(2)) as worker:
        worker._beat_once()


def cancel(storage: Storage, _: Path) -> None:
    set_state(storage, "tiny", "cancelled")
    end_unfinished(storage, "tiny")


BUDGET = study(9, name="other", budget={"hours": 1.0})
ACTIONS: dict[str, Callable[[Storage, Path], Any]] = {
    "resume": lambda storage, _: create_or_resume_study(storage, study(3)),
    "join": join,
    "run": lambda storage, folder: work(storage.url, study(9), folder / "log"),
    "run with a budget": lambda storage, folder: work(storage.url, BUDGET, folder / "log"),
    "read": lambda storage, _: (read_study(storage, "tiny"), list_studies(storage)),
    "cancel": cancel,
    "delete": lambda storage, _: delete_study(storage, "tiny"),
    "copy": copy,
}


@pytest.mark.parametrize("action", ACTIONS)
def test_no_second_connection_inside_a_transaction(storage_url: str, tmp_path: Path, action: str) -> None:
    with one_connection(), open_storage(storage_url) as storage:
        create_or_resume_study(storage, study(2))
        ACTIONS[action](storage, tmp_path)
