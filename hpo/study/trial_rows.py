"""Optuna's trials as rows of its tables, many in one statement and a whole trial in one transaction.

Optuna's own storage asks the database before each value that it writes, a commit a value, and reads trials
through an object mapper: a trial costs about fifty statements, which is what a hundred workers wait for.
These functions write the same rows, so that Optuna and its dashboard find what they would have written.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from optuna.distributions import BaseDistribution, distribution_to_json, json_to_distribution
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.dialects import postgresql, sqlite

studies: Any = models.StudyModel.__table__
trials: Any = models.TrialModel.__table__
params: Any = models.TrialParamModel.__table__
values: Any = models.TrialValueModel.__table__
user_attributes: Any = models.TrialUserAttributeModel.__table__
system_attributes: Any = models.TrialSystemAttributeModel.__table__
intermediate_values: Any = models.TrialIntermediateValueModel.__table__

_AT_ONCE = 500
"""The details of so many trials are read by one query; SQLite takes at most 32,766 values."""


def read_trials(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[FrozenTrial]:
    """The trials for which `condition`, on `trials`, holds, by number; times in UTC."""
    rows = connection.execute(sa.select(trials).where(condition).order_by(trials.c.trial_id)).all()
    details: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for start in range(0, len(rows), _AT_ONCE):
        ids = [row.trial_id for row in rows[start : start + _AT_ONCE]]
        for detail in connection.execute(_DETAILS, {"ids": ids}):
            details[detail.trial_id][detail.table].append(detail)
    return [_frozen_trial(row, details[row.trial_id]) for row in rows]


def _details(table: Any, **columns: Any) -> sa.Select[Any]:
    """What a table says of the trials `ids`, as `_COLUMNS`, so that one query reads all tables."""
    filled = (sa.cast(columns.get(name, sa.null()), kind).label(name) for name, kind in _COLUMNS.items())
    of = sa.literal_column(f"'{table.name}'", sa.String).label("table")
    return sa.select(of, table.c.trial_id, *filled).where(
        table.c.trial_id.in_(sa.bindparam("ids", expanding=True))
    )


_COLUMNS: dict[str, Any] = {
    "position": sa.Integer,
    "name": sa.String,
    "document": sa.Text,
    "value": sa.Float,
    "type": sa.String,
}
_DETAILS = sa.union_all(
    _details(
        params,
        position=params.c.param_id,
        name=params.c.param_name,
        document=params.c.distribution_json,
        value=params.c.param_value,
    ),
    _details(values, position=values.c.objective, value=values.c.value, type=values.c.value_type),
    _details(
        intermediate_values,
        position=intermediate_values.c.step,
        value=intermediate_values.c.intermediate_value,
        type=intermediate_values.c.intermediate_value_type,
    ),
    *(
        _details(table, name=table.c.key, document=table.c.value_json)
        for table in (user_attributes, system_attributes)
    ),
)


def _frozen_trial(row: Any, of: Mapping[str, list[Any]]) -> FrozenTrial:
    def in_order(table: Any) -> list[Any]:
        return sorted(of.get(table.name, ()), key=lambda detail: detail.position)

    def attributes(table: Any) -> dict[str, Any]:
        return {detail.name: json.loads(detail.document) for detail in of.get(table.name, ())}

    given = in_order(params)
    distributions = {param.name: _distribution(param.document) for param in given}
    value_of, value_type = models.TrialValueModel.stored_repr_to_value, models.TrialValueModel.TrialValueType
    reported = models.TrialIntermediateValueModel
    return FrozenTrial(
        number=row.number,
        trial_id=row.trial_id,
        state=row.state,
        value=None,
        values=[value_of(value.value, value_type[value.type]) for value in in_order(values)] or None,
        datetime_start=row.datetime_start,
        datetime_complete=row.datetime_complete,
        params={param.name: distributions[param.name].to_external_repr(param.value) for param in given},
        distributions=distributions,
        user_attrs=attributes(user_attributes),
        system_attrs=attributes(system_attributes),
        intermediate_values={
            value.position: reported.stored_repr_to_intermediate_value(
                value.value, reported.TrialIntermediateValueType[value.type]
            )
            for value in in_order(intermediate_values)
        },
    )


_OF_STUDY = sa.bindparam("study", type_=sa.Integer)
_LOCK = sa.select(studies.c.study_id).where(studies.c.study_id == _OF_STUDY).with_for_update()
_LAST_NUMBER = sa.select(trials.c.number).where(trials.c.study_id == _OF_STUDY)
_NEW_TRIAL = (
    sa.insert(trials)
    .values(
        study_id=_OF_STUDY,
        number=sa.func.coalesce(
            _LAST_NUMBER.order_by(trials.c.trial_id.desc()).limit(1).scalar_subquery() + 1, 0
        ),
        state=TrialState.RUNNING,
        datetime_start=sa.bindparam("started"),
    )
    .returning(trials.c.trial_id, trials.c.number)
)


def make_trial(
    connection: sa.Connection,
    study_id: int,
    system_attrs: Mapping[str, Any],
    user_attrs: Mapping[str, Any],
) -> FrozenTrial:
    """Add a running trial to a study, with the number after the last; first in its transaction."""
    # One at a time, as each takes the number after the last. Optuna takes the same lock.
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # sqlite3 would begin after the look at the numbers
    else:
        connection.execute(_LOCK, {"study": study_id})
    started = _now()
    trial_id, number = connection.execute(_NEW_TRIAL, {"study": study_id, "started": started}).one()
    write_attributes(connection, system_attributes, trial_id, system_attrs)
    write_attributes(connection, user_attributes, trial_id, user_attrs)
    return FrozenTrial(
        number=number,
        trial_id=trial_id,
        state=TrialState.RUNNING,
        value=None,
        datetime_start=started,
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs=dict(user_attrs),
        system_attrs=dict(system_attrs),
        intermediate_values={},
    )


def start_trial(connection: sa.Connection, trial_id: int) -> bool:
    """Start a trial that was enqueued; False: it does not wait any more."""
    waiting = (trials.c.trial_id == trial_id, trials.c.state == TrialState.WAITING)
    start = sa.update(trials).where(*waiting).values(state=TrialState.RUNNING, datetime_start=_now())
    return connection.execute(start).rowcount > 0


def write_params(
    connection: sa.Connection, trial_id: int, given: Iterable[tuple[str, float, BaseDistribution]]
) -> None:
    """Add parameters, each with its name, its internal value and its distribution; those it has stay."""
    rows = [
        {
            "trial_id": trial_id,
            "param_name": name,
            "param_value": value,
            "distribution_json": _distribution_json(distribution),
        }
        for name, value, distribution in given
    ]
    if rows:
        connection.execute(_unless_there(connection.dialect.name, params), rows)


def write_attributes(connection: sa.Connection, table: Any, trial_id: int, given: Mapping[str, Any]) -> None:
    """Set attributes of a trial in `table`, `user_attributes` or `system_attributes`."""
    if given:
        rows = [{"trial_id": trial_id, "key": key, "value_json": json.dumps(given[key])} for key in given]
        connection.execute(_or_change(connection.dialect.name, table, "key"), rows)


def write_intermediate_value(connection: sa.Connection, trial_id: int, step: int, value: float) -> None:
    """Set what a trial reported at `step`."""
    stored, kind = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr(value)
    row = {"trial_id": trial_id, "step": step, "intermediate_value": stored, "intermediate_value_type": kind}
    connection.execute(_or_change(connection.dialect.name, intermediate_values, "step"), [row])


def end_trial(
    connection: sa.Connection, trial_id: int, state: TrialState, objectives: Sequence[float] | None
) -> bool:
    """Give a running or waiting trial its last state and values; False: it had ended, and stays as it is."""
    unfinished = trials.c.state.in_([TrialState.RUNNING, TrialState.WAITING])
    end = sa.update(trials).where(trials.c.trial_id == trial_id, unfinished)
    if not connection.execute(end.values(state=state, datetime_complete=_now())).rowcount:
        return False
    if objectives:
        to_row = models.TrialValueModel.value_to_stored_repr
        rows = [
            dict(zip(("value", "value_type"), to_row(float(value)), strict=True))
            | {"trial_id": trial_id, "objective": index}
            for index, value in enumerate(objectives)
        ]
        connection.execute(sa.insert(values), rows)
    return True


# Statements are made once: to make one costs as much as to run it.


def _insert(dialect: str, table: Any) -> Any:
    return (postgresql if dialect == "postgresql" else sqlite).insert(table)


@lru_cache
def _unless_there(dialect: str, table: Any) -> Any:
    """Adds rows, but not where there is one."""
    return _insert(dialect, table).on_conflict_do_nothing()


@lru_cache
def _or_change(dialect: str, table: Any, name: str) -> Any:
    """Adds details of a trial by their `name`, in the place of those that it has."""
    insert = _insert(dialect, table)
    by = ["trial_id", name]
    changed = [column.name for column in table.c if not (column.primary_key or column.name in by)]
    new = {column: insert.excluded[column] for column in changed}
    return insert.on_conflict_do_update(index_elements=by, set_=new)


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)  # Optuna stores UTC without saying so


@lru_cache(maxsize=1024)
def _distribution(text: str) -> BaseDistribution:
    return json_to_distribution(text)


@lru_cache(maxsize=1024)
def _distribution_json(distribution: BaseDistribution) -> str:
    return distribution_to_json(distribution)
