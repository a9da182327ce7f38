"""Databases of other versions of hpo."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from detailed_documents import document
from old_tables import make_v1, make_v2, make_v3
from worker_process import study

from hpo.errors import StorageError
from hpo.study.detailed_evaluations import store_detailed_evaluation
from hpo.study.migrations import differences, newest_version, stored_version
from hpo.study.storage import open_storage


def test_a_new_database_is_of_the_newest_version(storage_url: str) -> None:
    with open_storage(storage_url) as storage, storage.engine.connect() as connection:
        assert stored_version(connection) == newest_version()
        assert differences(connection) == {}


def test_a_database_of_the_first_version_is_moved_up_with_what_it_holds(storage_url: str) -> None:
    make_v1(storage_url)
    with pytest.raises(StorageError, match=r"of an earlier hpo \(v1\). `hpo doctor --fix` moves them up"):
        open_storage(storage_url, create=False)
    with open_storage(storage_url) as storage:
        with storage.engine.connect() as connection:
            assert differences(connection) == {}
        assert storage.slot_counts("tiny") == {"open": 3, "running": 0, "done": 0}
        assert storage.create_or_resume_study(study(n_trials=3)).study_name == "tiny"
    with open_storage(storage_url, create=False) as storage:
        assert storage.read_study("tiny").slots["open"] == 3


def test_evaluations_of_the_second_version_have_no_numerics(storage_url: str) -> None:
    make_v2(storage_url)
    with open_storage(storage_url) as storage, storage.engine.connect() as connection:
        assert stored_version(connection) == newest_version()
        assert differences(connection) == {}
        ((evaluation,),) = (trial.evaluations for trial in storage.read_study("tiny").trials)
    assert (evaluation.step, evaluation.metrics, evaluation.numerics) == (40, {"score": 0.5}, None)


def test_trials_of_the_third_version_have_no_detailed_evaluation(storage_url: str) -> None:
    make_v3(storage_url)
    with pytest.raises(StorageError, match=r"of an earlier hpo \(v3\). `hpo doctor --fix` moves them up"):
        open_storage(storage_url, create=False)
    with open_storage(storage_url) as storage, storage.engine.connect() as connection:
        assert stored_version(connection) == newest_version()
        assert differences(connection) == {}
        assert [trial.detailed for trial in storage.read_study("tiny").trials] == [{}]
        assert store_detailed_evaluation(storage, "tiny", storage.study_token("tiny"), 0, document({}))
        assert [trial.detailed for trial in storage.read_study("tiny").trials] == [{"test": document({})}]


@pytest.mark.parametrize("create", [True, False])
def test_a_database_of_a_later_version_is_refused(storage_url: str, create: bool) -> None:
    with open_storage(storage_url) as storage, storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpo_version SET version_num = 'v999'"))
    with pytest.raises(StorageError, match=r"a later hpo has made them \(v999\). Update hpo"):
        open_storage(storage_url, create=create)
