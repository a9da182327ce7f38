from __future__ import annotations

import json
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from support.detailed_documents import document, error, task_document
from support.worker_process import run_trials, study

from hpo.errors import RunError
from hpo.study.reading.detailed_evaluations import _warn_once, store_detailed_evaluation
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import with_evaluation
from hpo.study.store.schema import detailed_evaluations
from hpo.study.store.storage import Storage

DOCUMENT = document({"a b": task_document("regression", {}, worst=[error("1", "\0 ☃", 1.0, 2.0)])})


def finished(storage: Storage, name: str = "tiny") -> str:
    """Run a study of two complete trials and return its token."""
    run_trials(storage, study(2, name=name))
    return storage.study_token(name)


def detailed(storage: Storage, name: str = "tiny") -> list[Any]:
    return [trial.detailed for trial in read_study(storage, name).trials]


def test_a_study_made_anew_gets_no_old_document(storage: Storage) -> None:
    old = finished(storage)
    store_detailed_evaluation(storage, "tiny", old, 0, DOCUMENT)
    optuna.delete_study(study_name="tiny", storage=storage.optuna)  # like the dashboard
    new = finished(storage)
    assert detailed(storage) == [{}, {}]
    store_detailed_evaluation(storage, "tiny", new, 0, DOCUMENT)
    with pytest.raises(RunError, match="deleted, or made anew"):
        store_detailed_evaluation(storage, "tiny", old, 0, document({}, num_examples=99))
    assert detailed(storage) == [{"test": DOCUMENT}, {}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps({**DOCUMENT, "version": 99}), "must have the version 2, but "),
        (json.dumps({**DOCUMENT, "tasks": None}), "this is no whole detailed evaluation: tasks: "),
        (json.dumps(DOCUMENT)[:-9], "this is no JSON: "),
    ],
    ids=["another version", "damaged", "cut"],
)
def test_an_unreadable_document_is_left_out_with_a_warning(
    storage: Storage, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    _warn_once.cache_clear()
    token = finished(storage)
    for split in ("test", "validation"):
        store_detailed_evaluation(storage, "tiny", token, 1, document({}, split))
    with storage.engine.begin() as connection:
        is_test = detailed_evaluations.c.split == "test"
        connection.execute(sa.update(detailed_evaluations).where(is_test).values(document=text))
    record = read_study(storage, "tiny")
    assert [list(trial.detailed) for trial in record.trials] == [[], ["validation"]]
    assert read_study(storage, "tiny").trials == record.trials
    (warning,) = [each.message for each in caplog.records]
    assert warning.startswith("The detailed evaluation of trial 1 on test of tiny is left out: ")
    assert why in warning
    store_detailed_evaluation(storage, "tiny", token, 1, DOCUMENT)
    assert read_study(storage, "tiny").trials == with_evaluation(record, 1, DOCUMENT).trials
