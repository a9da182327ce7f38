"""Detailed evaluations in the database."""

from __future__ import annotations

import math
from typing import Any

import optuna
from worker_process import result, study

from hpo.config.search_space import suggest
from hpo.study.detailed_evaluations import store_detailed_evaluation
from hpo.study.leases import Lease
from hpo.study.lifecycle import delete_study
from hpo.study.storage import Storage
from hpo.study.worker import run_worker

DOCUMENT: dict[str, Any] = {"split": "test", "tasks": {"a b": {"worst": [{"text": "\0 ☃"}]}}}


def finished(storage: Storage, name: str = "tiny") -> str:
    """A study of two complete trials; its token."""
    config = study(2, name=name)
    storage.create_or_resume_study(config)

    def execute(trial: optuna.trial.Trial, _: Lease) -> Any:
        suggest(config.search_space, trial)
        return result("complete")

    run_worker(config, storage, execute)
    return storage.study_token(name)


def detailed(storage: Storage, name: str = "tiny") -> list[Any]:
    return [trial.detailed for trial in storage.read_study(name).trials]


def test_a_document_is_read_back_with_its_trial(storage: Storage) -> None:
    token, other = finished(storage), finished(storage, "other")
    assert detailed(storage) == [{}, {}]
    assert store_detailed_evaluation(storage, "tiny", token, 1, DOCUMENT)
    assert store_detailed_evaluation(storage, "tiny", token, 1, {"split": "validation", "loss": math.nan})
    assert store_detailed_evaluation(storage, "other", other, 0, {"split": "test"})
    assert detailed(storage) == [{}, {"test": DOCUMENT, "validation": {"split": "validation", "loss": None}}]
    assert detailed(storage, "other") == [{"test": {"split": "test"}}, {}]


def test_a_later_document_of_a_split_replaces_the_earlier(storage: Storage) -> None:
    token = finished(storage)
    for num in (1, 2):
        store_detailed_evaluation(storage, "tiny", token, 0, {"split": "test", "num_examples": num})
    assert detailed(storage) == [{"test": {"split": "test", "num_examples": 2}}, {}]


def test_nothing_goes_over_to_a_study_made_anew(storage: Storage) -> None:
    old = finished(storage)
    assert store_detailed_evaluation(storage, "tiny", old, 0, DOCUMENT)
    optuna.delete_study(study_name="tiny", storage=storage.optuna)  # as the dashboard does
    new = finished(storage)
    assert detailed(storage) == [{}, {}]
    assert store_detailed_evaluation(storage, "tiny", new, 0, DOCUMENT)
    late = {"split": "test", "num_examples": 99}
    assert not store_detailed_evaluation(storage, "tiny", old, 0, late), "it was computed before"
    assert detailed(storage) == [{"test": DOCUMENT}, {}]
    delete_study(storage, "tiny")
    assert not store_detailed_evaluation(storage, "tiny", new, 0, late)
    finished(storage)
    assert detailed(storage) == [{}, {}]
