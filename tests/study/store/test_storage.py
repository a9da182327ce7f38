from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from support.worker_process import begin, evaluate, result, study, worker_on

from hpo.config.search_space import suggest
from hpo.errors import StorageError, StudyChangedError
from hpo.study.claims import lease as lease_module
from hpo.study.claims.leases import WorkerLease
from hpo.study.reading.reader import read_study
from hpo.study.store.lifecycle import checkpoints_folder
from hpo.study.store.schema import EvaluationRow
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import bind_data, check_data, create_or_resume_study


def run_trials(storage: Storage, config: Any, *results: Any) -> optuna.Study:
    """Run one trial for each of `results`, and return the study."""
    opened = create_or_resume_study(storage, config)
    with WorkerLease(storage, opened, max_retries=config.max_retries) as worker:
        for trial_result in results:
            lease, trial = begin(worker)
            suggest(config.search_space, trial)
            worker.record_outcome(lease, trial_result)
    return opened


# The definition


def test_safe_changes_of_the_definition(storage: Storage) -> None:
    create_or_resume_study(storage, study(3, amp={"memory_fraction": 0.5}))
    changes: dict[str, Any] = {
        "sampler": {"name": "tpe"},
        "pruner": {"name": "median"},
        "timeout": 5.0,
        "max_retries": 3,
        "device": "cpu",
        "checkpoint": {"top_k": 1},
    }
    create_or_resume_study(storage, study(4, amp={"memory_fraction": 0.25}, **changes))
    definition = read_study(storage, "tiny").definition
    assert (definition["timeout"], definition["n_trials"]) == (5.0, 4)
    assert definition["amp"]["memory_fraction"] == 0.25
    create_or_resume_study(storage, study(4))
    assert read_study(storage, "tiny").definition["amp"]["memory_fraction"] is None


def test_grid_has_one_trial_for_each_combination(storage: Storage) -> None:
    space = {"pooling": {"type": "categorical", "choices": ["cls", "mean"]}}
    for n_trials, sampler, num_trials in ((1, "grid", 1), (3, "grid", 2), (3, "random", 3), (9, "grid", 2)):
        create_or_resume_study(storage, study(n_trials, search_space=space, sampler={"name": sampler}))
        assert storage.trial_counts("tiny")["open"] == num_trials


# The data


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


# The size


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


def test_study_of_another_program_is_refused(storage: Storage) -> None:
    optuna.create_study(study_name="tiny", storage=storage.optuna).ask()
    with pytest.raises(StorageError, match=r"`tiny` in .* was not made by hpo"):
        create_or_resume_study(storage, study(2))


def test_unknown_study_names_the_nearest(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="It holds no study"):
        read_study(storage, "tini")
    create_or_resume_study(storage, study(2))
    with pytest.raises(StorageError, match=r"no study `tini` in .*Did you mean `tiny`"):
        read_study(storage, "tini")
    with pytest.raises(StorageError, match="must be letters, digits"):
        checkpoints_folder(storage, "../tiny", tmp_path)


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


def test_headline_and_telemetry(storage: Storage) -> None:
    headline = {
        "fp_precision_effective": "bf16",
        "train_examples_per_second": np.float32(7.5),
        "peak_memory_bytes": np.int64(2**40),
    }
    telemetry = {"metrics": {"task": {"f1_macro": float("nan")}}, "scale_max": float("inf"), "n": (1, 2)}
    done = run_trials(storage, study(1), result("complete", headline=headline, telemetry=telemetry))
    attributes = done.trials[0].user_attrs
    assert attributes.pop("active_seconds") >= 0
    assert attributes.pop("worker") == read_study(storage, "tiny").workers[0].id
    assert attributes == {
        "outcome": "complete",
        "outcome_reason": "",
        "fp_precision_effective": "bf16",
        "train_examples_per_second": 7.5,
        "peak_memory_bytes": 2**40,
        "telemetry": {"metrics": {"task": {"f1_macro": None}}, "scale_max": None, "n": [1, 2]},
    }


@pytest.mark.parametrize("values", [None, (float("nan"),)])
def test_complete_trial_must_have_finite_values(storage: Storage, values: Any) -> None:
    with pytest.raises(ValueError, match="finite values"):
        run_trials(storage, study(1), result("complete", values=values))


def test_evaluations_are_stored_and_reported_once(storage: Storage) -> None:
    opened = create_or_resume_study(storage, study(1))
    with WorkerLease(storage, opened, max_retries=0) as worker:
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
    assert opened.trials[0].intermediate_values == {1: 0.5}


def test_evaluations_after_the_checkpoint_are_dropped(storage: Storage) -> None:
    with worker_on(storage, study(2)) as worker, worker_on(storage, study(2)) as other:
        trials = [begin(one)[1] for one in (worker, other)]
        for trial in trials:
            for index in (1, 2, 3):
                evaluate(storage, trial, index, step=40 * index)
        evaluate(storage, trials[0], 2, 0.7, 80, seconds=4.0)
    again, untouched = read_study(storage, "tiny").trials
    assert [(row.step, row.seconds) for row in again.evaluations] == [(40, 1.0), (80, 4.0)]
    assert [row.step for row in untouched.evaluations] == [40, 80, 120]
    # Optuna keeps the later value until the trial reports it again.
    assert storage.load_study("tiny").trials[0].intermediate_values == {1: 0.5, 2: 0.7, 3: 0.5}


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


def test_several_objectives(storage: Storage) -> None:
    objective = [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]
    with worker_on(storage, study(2, objective=objective)) as worker:
        lease, trial = begin(worker)
        assert trial.study.metric_names == ["score", "peak_memory_bytes"], "for the dashboard"
        assert evaluate(storage, trial) is False, "Optuna cannot prune by two objectives"
        worker.record_outcome(lease, result("complete", values=(0.5, 100.0)))
    record = read_study(storage, "tiny")
    assert record.directions == ("maximize", "minimize")
    assert record.trials[0].values == (0.5, 100.0)


def test_compat_cache_keeps_the_first_result(storage: Storage) -> None:
    assert storage.get_compat("key") is None
    first = {"verdict": "ok", "speed": None}
    assert storage.put_compat("key", {"verdict": "ok", "speed": float("nan")}) == first
    assert storage.put_compat("key", {"verdict": "degraded"}) == first
    assert storage.get_compat("key") == first
    assert storage.get_compat("other") is None
