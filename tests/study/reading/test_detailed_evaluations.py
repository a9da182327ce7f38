"""Detailed evaluations in the database."""

from __future__ import annotations

import json
import math
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from support.detailed_documents import document, error, task_document
from support.worker_process import run_trials, study

from hpo.errors import RunError
from hpo.study.reading.detailed_evaluations import _say_left_out, store_detailed_evaluation
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import with_evaluation
from hpo.study.store.lifecycle import delete_study
from hpo.study.store.schema import detailed_evaluations
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

DOCUMENT = document({"a b": task_document("regression", {}, worst=[error("1", "\0 ☃", 1.0, 2.0)])})


def finished(storage: Storage, name: str = "tiny") -> str:
    """A study of two complete trials; its token."""
    config = study(2, name=name)
    create_or_resume_study(storage, config)
    run_trials(storage, config)
    return storage.study_token(name)


def detailed(storage: Storage, name: str = "tiny") -> list[Any]:
    return [trial.detailed for trial in read_study(storage, name).trials]


def test_a_document_is_read_back_with_its_trial(storage: Storage) -> None:
    token, other = finished(storage), finished(storage, "other")
    assert detailed(storage) == [{}, {}]
    half = {"value": 0.5, "low": 0.25, "high": math.nan}
    for one in (document({}, num_examples=1), DOCUMENT, document({}, "validation", score=half)):
        store_detailed_evaluation(storage, "tiny", token, 1, one)  # the last of each split stays
    store_detailed_evaluation(storage, "other", other, 0, document({}))
    half = half | {"high": None}
    assert detailed(storage) == [{}, {"test": DOCUMENT, "validation": document({}, "validation", score=half)}]
    assert detailed(storage, "other") == [{"test": document({})}, {}]


def test_nothing_goes_over_to_a_study_made_anew(storage: Storage) -> None:
    old = finished(storage)
    store_detailed_evaluation(storage, "tiny", old, 0, DOCUMENT)
    optuna.delete_study(study_name="tiny", storage=storage.optuna)  # as the dashboard does
    new = finished(storage)
    assert detailed(storage) == [{}, {}]
    store_detailed_evaluation(storage, "tiny", new, 0, DOCUMENT)
    late = document({}, num_examples=99)
    with pytest.raises(RunError, match="deleted, or made anew"):  # it was computed before
        store_detailed_evaluation(storage, "tiny", old, 0, late)
    assert detailed(storage) == [{"test": DOCUMENT}, {}]
    delete_study(storage, "tiny")
    with pytest.raises(RunError, match="deleted, or made anew"):
        store_detailed_evaluation(storage, "tiny", new, 0, late)
    finished(storage)
    assert detailed(storage) == [{}, {}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps({**DOCUMENT, "version": 99}), "must have the version 2, but this one has 99."),
        (json.dumps({**DOCUMENT, "tasks": None}), "this is no whole detailed evaluation: tasks: "),
        (json.dumps(DOCUMENT)[:-9], "this is no JSON: "),
    ],
    ids=["another version", "damaged", "cut"],
)
def test_a_document_that_cannot_be_read_is_left_out_with_a_word(
    storage: Storage, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    _say_left_out.cache_clear()
    token = finished(storage)
    for split in ("test", "validation"):
        store_detailed_evaluation(storage, "tiny", token, 1, document({}, split))
    with storage.engine.begin() as connection:
        is_test = detailed_evaluations.c.split == "test"
        connection.execute(sa.update(detailed_evaluations).where(is_test).values(document=text))
    record = read_study(storage, "tiny")
    assert [list(trial.detailed) for trial in record.trials] == [[], ["validation"]]
    assert read_study(storage, "tiny").trials == record.trials
    (said,) = [each.message for each in caplog.records]
    assert said.startswith("The detailed evaluation of trial 1 on test of tiny is left out: ")
    assert why in said
    changed = with_evaluation(record, 1, DOCUMENT)
    assert changed.trials[1].detailed == {"test": DOCUMENT, "validation": document({}, "validation")}
    store_detailed_evaluation(storage, "tiny", token, 1, DOCUMENT)
    assert read_study(storage, "tiny").trials == changed.trials
