"""Optuna's tables, as far as our own SQL reads them.

Optuna's models need its package and SQLAlchemy's ORM, and its storage needs alembic: 0.3 s of CPU, which
`hpo status` does without. States are texts here. Code that changes a table uses `optuna_internals`.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

REVISION = "v3.2.0.a"
"""The version of these tables. Optuna checks the others when its storage is opened."""


def _table(name: str, *columns: str, **typed: type[sa.types.TypeEngine[Any]]) -> sa.TableClause:
    return sa.table(name, *map(sa.column, columns), *(sa.column(*of) for of in typed.items()))


_TIMES = {"datetime_start": sa.DateTime, "datetime_complete": sa.DateTime}
studies = _table("studies", "study_id", "study_name")
study_user_attributes = _table("study_user_attributes", "study_id", "key", "value_json")
study_system_attributes = _table("study_system_attributes", "study_id", "key", "value_json")
trials = _table("trials", "trial_id", "number", "study_id", "state", **_TIMES)
params = _table("trial_params", "param_id", "trial_id", "param_name", "param_value", "distribution_json")
values = _table("trial_values", "trial_id", "objective", "value")
user_attributes = _table("trial_user_attributes", "trial_user_attribute_id", "trial_id", "key", "value_json")
system_attributes = _table("trial_system_attributes", "trial_id", "key", "value_json")

CONSTRAINTS = "constraints"
"""The keys of a trial's constraints begin with it."""


def constraint(key: str, value: Any) -> dict[str, float]:
    """Return the constraints, by name, that a system attribute of a trial holds."""
    if key == CONSTRAINTS:  # as Optuna before 5 stores all of them
        return {str(index): each for index, each in enumerate(value)}
    return {key.removeprefix(f"{CONSTRAINTS}:"): value}


def revision(connection: sa.Connection) -> str | None:
    """Return the version of Optuna's tables; None: it is not known."""
    return connection.execute(sa.select(_table("alembic_version", "version_num"))).scalar()
