"""Copy of a whole study from one database to another, where it continues like the original.

The rows of Optuna's tables and ours are read in one snapshot and written in one transaction. The study keeps
its token, so its trials find their checkpoints. Dead workers lose their claims. Optuna's heartbeats,
compatibility checks and NSGA-II's lists of parents are not copied: the ids in those lists are valid in the
source only, so the sampler selects parents again.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from hpo.errors import InputError
from hpo.redaction import redact
from hpo.study.store import optuna_internals, schema
from hpo.study.store.database import snapshot
from hpo.study.store.failures import explain
from hpo.study.store.foreign import remove_optuna_orphans
from hpo.study.store.opening import exclusive
from hpo.study.store.optuna_internals import study_id_of
from hpo.study.store.schema import claims, studies, workers
from hpo.study.store.storage import Storage

_Rows = dict[sa.Table, list[dict[str, Any]]]

_STUDIES, _TRIALS = optuna_internals.studies, optuna_internals.trials
OF_STUDY = tuple(
    table for table in optuna_internals.tables if "study_id" in table.c and table not in (_STUDIES, _TRIALS)
)
OF_TRIAL = tuple(
    table
    for table in optuna_internals.tables
    if "trial_id" in table.c and table.name not in ("trials", "trial_heartbeats")
)
"""Copied tables of Optuna. Every row belongs to one study, or to one trial."""
OURS: tuple[sa.Table, ...] = tuple(
    table for table in schema.metadata.sorted_tables if "study" in table.c and table.name != "hpo_workers"
)
"""Our tables with rows that are copied unchanged."""


def copy_study(source: Storage, target: Storage, name: str) -> int:
    """Copy the study `name` from `source` to `target`; return its number of trials in Optuna's tables.

    Raises:
        InputError: workers are live in the study, or the target has a study of this name.
        StorageError: the study does not exist.
        RunError: a database failed; the target is unchanged.
    """
    study_id = study_id_of(source.load_study(name))  # raises if it does not exist
    source.watch_workers(workers.c.study == name)
    rows = source.persist(lambda: _read(source, name, study_id))
    try:
        with exclusive(target.engine) as connection:
            _make_room(connection, target.url, rows[studies][0]["token"], name)
            return _write(connection, name, rows)
    except SQLAlchemyError as error:
        raise explain(target.url, error) from error


def _read(source: Storage, name: str, study_id: int) -> _Rows:
    in_study = sa.select(_TRIALS.c.trial_id).where(_TRIALS.c.study_id == study_id)
    conditions = {studies: studies.c.name == name, _TRIALS: _TRIALS.c.study_id == study_id}
    conditions |= {table: table.c.study == name for table in (*OURS, workers)}
    conditions |= {table: table.c.study_id == study_id for table in OF_STUDY}
    conditions |= {table: table.c.trial_id.in_(in_study) for table in OF_TRIAL}
    attributes = optuna_internals.study_system_attributes
    conditions[attributes] = conditions[attributes] & attributes.c.key.not_like("%:parent:%")
    with snapshot(source.engine) as connection:
        if live := source.live_workers(connection, workers.c.study == name):
            raise InputError(
                f"A study must have no live worker while it is copied, but `{name}` has {len(live)}. "
                f"`hpo pause {name}` lets them leave."
            )
        rows: _Rows = {}
        for table, condition in conditions.items():
            query = sa.select(table).where(condition).order_by(*table.primary_key)
            rows[table] = [dict(row) for row in connection.execute(query).mappings()]
        return rows


def _make_room(connection: sa.Connection, url: str, token: str, name: str) -> None:
    if connection.execute(sa.select(_STUDIES).where(_STUDIES.c.study_name == name)).first() is not None:
        same = sa.select(studies.c.name).where(studies.c.name == name, studies.c.token == token)
        if connection.execute(same).first() is not None:
            raise InputError(
                f"{redact(url)} holds the study `{name}` already, with the same checkpoints. Go on with that "
                "one, or name another database."
            )
        raise InputError(f"{redact(url)} has another study `{name}`. Name another database.")
    schema.delete_rows(connection, name)
    remove_optuna_orphans(connection)  # the copy may get their ids


def _write(connection: sa.Connection, name: str, rows: _Rows) -> int:
    made = sa.insert(_STUDIES).values(study_name=name).returning(_STUDIES.c.study_id)
    study_id = connection.execute(made).scalar_one()
    trial_ids: dict[int, int] = {}
    if trials := rows[_TRIALS]:
        insert = sa.insert(_TRIALS).returning(_TRIALS.c.trial_id, sort_by_parameter_order=True)
        new = [{**_without_id(_TRIALS, row), "study_id": study_id} for row in trials]
        ids = connection.execute(insert, new).scalars()
        trial_ids = dict(zip((row["trial_id"] for row in trials), ids, strict=True))
    for table in OF_STUDY:
        new = [{**_without_id(table, row), "study_id": study_id} for row in rows[table]]
        _insert(connection, table, new)
    for table in OF_TRIAL:
        new = [{**_without_id(table, row), "trial_id": trial_ids[row["trial_id"]]} for row in rows[table]]
        _insert(connection, table, new)
    for table in (studies, *OURS, workers):
        _insert(connection, table, rows[table])
    connection.execute(sa.update(claims).where(claims.c.study == name).values(owner=None))
    dead = (workers.c.study == name, workers.c.state == "live")
    connection.execute(sa.update(workers).where(*dead).values(state="dead"))
    return len(trial_ids)


def _insert(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(sa.insert(table), rows)


def _without_id(table: sa.Table, row: dict[str, Any]) -> dict[str, Any]:
    ids = {column.name for column in table.primary_key}
    return {key: value for key, value in row.items() if key not in ids}
