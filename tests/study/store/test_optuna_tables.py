"""Optuna's tables are as our own SQL reads them."""

from __future__ import annotations

import optuna
import pytest
import sqlalchemy as sa

from hpo.study.store import optuna_internals, optuna_tables
from hpo.study.store.storage import open_storage

LIGHT = {table.name: table for table in vars(optuna_tables).values() if isinstance(table, sa.TableClause)}


@pytest.mark.parametrize("name", LIGHT)
def test_each_column_is_one_of_optuna(name: str) -> None:
    (optunas,) = (table for table in optuna_internals.tables if table.name == name)
    assert {*LIGHT[name].c.keys()} <= {*optunas.c.keys()}


def test_the_revision_is_that_of_this_optuna(storage_url: str) -> None:
    with open_storage(storage_url) as storage, storage.engine.connect() as connection:
        assert optuna_tables.revision(connection) == optuna_tables.REVISION
        assert isinstance(storage.optuna, optuna.storages.BaseStorage)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("constraints:memory", 0.5, {"memory": 0.5}), ("constraints", [0.5, -1.0], {"0": 0.5, "1": -1.0})],
)
def test_constraints_are_read_as_optuna_reads_them(key: str, value: object, expected: object) -> None:
    assert optuna_tables.constraint(key, value) == expected == optuna_internals.constraints_of({key: value})
