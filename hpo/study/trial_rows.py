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

_AS_LIST = 500
"""So many trials are named one by one in a query; SQLite takes at most 32,766 values."""


def read_trials(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[FrozenTrial]:
    """The trials for which `condition`, on `trials`, holds, by number; times in UTC."""
    rows = connection.execute(sa.select(trials).where(condition).order_by(trials.c.trial_id)).all()
    if not rows:
        return []
    ids: Any = [row.trial_id for row in rows]
    if len(ids) > _AS_LIST:
        ids = sa.select(trials.c.trial_id).where(condition)

    def of_trials(table: Any, *order: Any) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = defaultdict(list)
        query = sa.select(table).where(table.c.trial_id.in_(ids)).order_by(*order)
        for row in connection.execute(query):
            found[row.trial_id].append(row)
        return found

    of = {
        table: of_trials(table, *order)
        for table, *order in (
            (params, params.c.param_id),
            (values, values.c.objective),
            (user_attributes,),
            (system_attributes,),
            (intermediate_values, intermediate_values.c.step),
        )
    }
    return [_frozen_trial(row, {table: found[row.trial_id] for table, found in of.items()}) for row in rows]


def _frozen_trial(row: Any, of: Mapping[Any, Sequence[Any]]) -> FrozenTrial:
    distributions = {param.param_name: _distribution(param.distribution_json) for param in of[params]}
    to_value = models.TrialValueModel.stored_repr_to_value
    to_intermediate = models.TrialIntermediateValueModel.stored_repr_to_intermediate_value
    return FrozenTrial(
        number=row.number,
        trial_id=row.trial_id,
        state=row.state,
        value=None,
        values=[to_value(value.value, value.value_type) for value in of[values]] or None,
        datetime_start=row.datetime_start,
        datetime_complete=row.datetime_complete,
        params={
            param.param_name: distributions[param.param_name].to_external_repr(param.param_value)
            for param in of[params]
        },
        distributions=distributions,
        user_attrs={attr.key: json.loads(attr.value_json) for attr in of[user_attributes]},
        system_attrs={attr.key: json.loads(attr.value_json) for attr in of[system_attributes]},
        intermediate_values={
            value.step: to_intermediate(value.intermediate_value, value.intermediate_value_type)
            for value in of[intermediate_values]
        },
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
        lock = sa.select(studies.c.study_id).where(studies.c.study_id == study_id)
        connection.execute(lock.with_for_update())
    last = sa.select(trials.c.number).where(trials.c.study_id == study_id)
    number = connection.execute(last.order_by(trials.c.trial_id.desc()).limit(1)).scalar()
    number, started = 0 if number is None else number + 1, _now()
    new = sa.insert(trials).values(
        study_id=study_id, number=number, state=TrialState.RUNNING, datetime_start=started
    )
    trial_id = connection.execute(new.returning(trials.c.trial_id)).scalar_one()
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
        connection.execute(_insert(connection, params).values(rows).on_conflict_do_nothing())


def write_attributes(connection: sa.Connection, table: Any, trial_id: int, given: Mapping[str, Any]) -> None:
    """Set attributes of a trial in `table`, `user_attributes` or `system_attributes`."""
    if given:
        rows = [{"trial_id": trial_id, "key": key, "value_json": json.dumps(given[key])} for key in given]
        insert = _insert(connection, table).values(rows)
        on = [table.c.trial_id, table.c.key]
        new = {"value_json": insert.excluded.value_json}
        connection.execute(insert.on_conflict_do_update(index_elements=on, set_=new))


def write_intermediate_value(connection: sa.Connection, trial_id: int, step: int, value: float) -> None:
    """Set what a trial reported at `step`."""
    stored, kind = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr(value)
    given = {"intermediate_value": stored, "intermediate_value_type": kind}
    insert = _insert(connection, intermediate_values).values(trial_id=trial_id, step=step, **given)
    on = [intermediate_values.c.trial_id, intermediate_values.c.step]
    connection.execute(insert.on_conflict_do_update(index_elements=on, set_=given))


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
        connection.execute(sa.insert(values).values(rows))
    return True


def _insert(connection: sa.Connection, table: Any) -> Any:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)  # Optuna stores UTC without saying so


@lru_cache(maxsize=1024)
def _distribution(text: str) -> BaseDistribution:
    return json_to_distribution(text)


@lru_cache(maxsize=1024)
def _distribution_json(distribution: BaseDistribution) -> str:
    return distribution_to_json(distribution)
