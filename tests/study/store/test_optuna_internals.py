"""Optuna's private interface is unchanged."""

from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState
from support.worker_process import run_trials, study

from hpo.errors import StorageError
from hpo.study.store import optuna_internals
from hpo.study.store.storage import TOKEN_ATTR, Storage, open_storage

VERSIONS = ("5.0.0",)
"""Versions whose source was compared with `optuna_internals`, and that passed these tests."""


def test_version_was_checked() -> None:
    assert optuna.__version__ in VERSIONS


@pytest.mark.parametrize("is_enqueued", [False, True])
def test_trial_equals_one_of_optuna(storage_url: str, is_enqueued: bool) -> None:
    with open_storage(storage_url) as storage:
        study = optuna.create_study(study_name="s", storage=storage.optuna._backend)
        study_id = optuna_internals.study_id_of(study)
        study.enqueue_trial({"x": 0.5}, user_attrs={"retry_of": 3})
        study.enqueue_trial({"x": 0.5}, user_attrs={"retry_of": 3})
        attributes: dict[str, Any] = {"fixed_params": {"x": 0.5}, "user_attrs": {"retry_of": 3}}
        study.ask()
        with storage.engine.begin() as connection:
            if is_enqueued:
                second = optuna_internals.trial_id_of(study.trials[1])
                assert optuna_internals.start_trial(connection, second)
                assert not optuna_internals.start_trial(connection, second)
            else:
                assert optuna_internals.make_trial(connection, study_id, **attributes) == 2
        optunas, ours = study.trials[0], study.trials[1 if is_enqueued else 2]
        assert ours.state == optunas.state == TrialState.RUNNING
        assert (ours.datetime_start - optunas.datetime_start).total_seconds() < 60
        assert (ours.system_attrs, ours.user_attrs) == (optunas.system_attrs, optunas.user_attrs)
        rows = []
        with storage.engine.connect() as connection:
            for trial in (optunas, ours):
                table, trial_id = optuna_internals.trials, optuna_internals.trial_id_of(trial)
                row = connection.execute(sa.select(table).where(table.c.trial_id == trial_id)).one()
                rows.append({**row._mapping, "trial_id": 0, "number": 0, "datetime_start": None})
        assert rows[0] == rows[1]
        study.tell(ours.number, 1.0)
        assert study.trials[ours.number].value == 1.0


def test_revision_of_the_tables(sqlite_url: str) -> None:
    with open_storage(sqlite_url) as storage, storage.engine.connect() as connection:
        assert optuna_internals.revision(connection) == optuna_internals.REVISION


@pytest.mark.parametrize(
    ("table", "damage", "message"),
    [
        (optuna_internals.user_attributes, {"value_json": "{cut"}, "trial is damaged"),
        (optuna_internals.params, {"distribution_json": '{"name": "Unknown"}'}, "trial is damaged"),
        (optuna_internals.table_of_values, {"value": None}, "trial is damaged"),
        (
            optuna_internals.study_system_attributes,
            {"value_json": "{cut"},
            f"`{TOKEN_ATTR}` of .* is damaged",
        ),
    ],
)
def test_damaged_row_is_one_error(
    storage: Storage, table: sa.Table, damage: dict[str, Any], message: str
) -> None:
    run_trials(storage, study(2))
    with storage.engine.begin() as connection:
        connection.execute(sa.update(table).values(damage))
    with open_storage(storage.url) as reader, pytest.raises(StorageError, match=message):
        run_trials(reader, study(3))
