"""Workers side by side prune each other's trials as plain Optuna does."""

from __future__ import annotations

from contextlib import ExitStack

import optuna
import pytest
from worker_process import change_worker, evaluate, study

from hpo.study.claims import leases
from hpo.study.claims.leases import WorkerLease
from hpo.study.sampling.samplers import build_pruner
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

VALUES = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
ASHA = {"name": "asha", "min_resource": 1, "reduction_factor": 2}


def test_trials_side_by_side_are_pruned_as_by_plain_optuna(storage: Storage) -> None:
    config = study(len(VALUES), pruner=ASHA)
    plain = optuna.create_study(direction="maximize", pruner=build_pruner(config.pruner))
    expected = []
    for trial, value in zip([plain.ask() for _ in VALUES], VALUES, strict=True):
        trial.report(value, 1)
        expected.append(trial.should_prune())
    assert sum(expected) == 7
    with ExitStack() as stack:
        trials = []
        for _ in VALUES:
            own = stack.enter_context(open_storage(storage.url))
            opened = create_or_resume_study(own, config)
            opened.pruner = build_pruner(config.pruner)
            worker = stack.enter_context(WorkerLease(own, opened, max_retries=0))
            trials.append((own, worker.open_trial(worker.claim())))
        for (own, trial), value, is_pruned in zip(trials, VALUES, expected, strict=True):
            assert evaluate(own, trial, 1, value) == is_pruned


def test_rungs_outlive_the_worker(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LOOK_SECONDS", 0.0)
    config = study(1, pruner=ASHA)
    with ExitStack() as stack:
        for index, value in ((1, 0.5), (2, 0.6), (4, 0.7)):
            own = stack.enter_context(open_storage(storage.url))
            opened = create_or_resume_study(own, config)
            opened.pruner = build_pruner(config.pruner)
            worker = stack.enter_context(WorkerLease(own, opened, max_retries=0))
            assert not evaluate(own, worker.open_trial(worker.claim()), index, value)
            change_worker(own, worker, process_start="1")
        (trial,) = storage.load_study("tiny").get_trials()
    rungs = {key: value for key, value in trial.system_attrs.items() if "rung" in key}
    assert rungs == {"completed_rung_0": 0.5, "completed_rung_1": 0.6, "completed_rung_2": 0.7}
