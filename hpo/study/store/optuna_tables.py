"""Optuna's tables as plain SQL, for reading. States are texts here.

`optuna_internals` has the same tables as Optuna's models, for changes.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

REVISION = "v3.2.0.a"
"""Version of these tables. For any other version, Optuna checks its tables at opening."""


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
"""Prefix of the keys of a trial's constraints."""


def constraint(key: str, value: Any) -> dict[str, float]:
    """Return the constraints in a system attribute of a trial, by name."""
    if key == CONSTRAINTS:  # Optuna before 5 stores all of them like this
        return {str(index): each for index, each in enumerate(value)}
    return {key.removeprefix(f"{CONSTRAINTS}:"): value}


def revision(connection: sa.Connection) -> str | None:
    """Return the version of Optuna's tables, or None if it is unknown."""
    return connection.execute(sa.select(_table("alembic_version", "version_num"))).scalar()
