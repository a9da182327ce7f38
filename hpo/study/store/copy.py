"""A study from one database to another, whole: it goes on there as if it had been made there.

`optuna.copy_study` does not do: it commits trial by trial, so a copy that is killed leaves half a study; it
takes NSGA-II's lists of parents as they are, though these name trials by ids that differ between databases;
and it knows none of our tables. Here the rows themselves go over, Optuna's and ours, in one transaction. The
study keeps its token, by which its trials find their checkpoints.

What stays behind belongs to the moment or the machine: the hold of dead workers on a slot (a running slot is
open in the copy, and its trial goes on), Optuna's heartbeats, and compatibility checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from hpo.errors import InputError
from hpo.study.store import optuna_internals, schema
from hpo.study.store.database import allow_idle, redact, snapshot
from hpo.study.store.failures import explain
from hpo.study.store.lock import exclusive
from hpo.study.store.schema import slots, studies, workers
from hpo.study.store.storage import Storage

_STUDIES, _TRIALS = optuna_internals.studies, optuna_internals.trials
OF_STUDY = tuple(
    table for table in optuna_internals.tables if "study_id" in table.c and table not in (_STUDIES, _TRIALS)
)
OF_TRIAL = tuple(
    table
    for table in optuna_internals.tables
    if "trial_id" in table.c and table.name not in ("trials", "trial_heartbeats")
)
"""Optuna's tables of which every row belongs to one study, or to one trial, and is copied."""
OURS: tuple[sa.Table, ...] = tuple(
    table for table in schema.metadata.sorted_tables if "study" in table.c and table.name != "hpo_workers"
)
"""Our tables whose rows are copied as they are."""

_PARENTS = re.compile(r"\w+:parent:\d+")  # attributes of Optuna's BaseGASampler: a list of trial ids
_CHUNK = 2000
"""Rows that are read and written at once."""


def copy_study(source: Storage, target: Storage, name: str) -> int:
    """Copy the study `name` from `source` to `target`; return how many trials Optuna has of it.

    Raises:
        InputError: workers are live in the study, or the target has this one already, or another of its name.
        StorageError: there is no such study.
        RunError: a database failed; the target is as it was.
    """
    source.load_study(name)  # refuses one that is not there
    try:
        with snapshot(source.engine) as connection:
            allow_idle(connection)
            reading = _Reading(source.url, connection)
            row = reading.one(sa.select(studies).where(studies.c.name == name))
            _refuse_live(name, source.live_workers(connection, workers.c.study == name))
            with exclusive(target.engine) as lock, target.engine.begin() as writing:
                allow_idle(lock, writing)
                _make_room(writing, target.url, row["token"], name)
                _copy_ours(reading, writing, row)
                return _copy_optunas(reading, writing, name)
    except SQLAlchemyError as error:
        raise explain(target.url, error) from error


class _Reading:
    """Rows of the source; its errors name the source."""

    def __init__(self, url: str, connection: sa.Connection) -> None:
        self._url = url
        self._connection = connection

    def chunks(self, query: sa.Select[Any]) -> Iterator[list[dict[str, Any]]]:
        """The rows of a query, at most `_CHUNK` at once."""
        try:
            rows = self._connection.execution_options(yield_per=_CHUNK).execute(query)
            for chunk in rows.mappings().partitions():
                yield [dict(row) for row in chunk]
        except SQLAlchemyError as error:
            raise explain(self._url, error) from error

    def one(self, query: sa.Select[Any]) -> dict[str, Any]:
        return next(self.chunks(query))[0]


def _refuse_live(name: str, live: Collection[str]) -> None:
    """Raise InputError where a worker would go on with the study after it was copied."""
    if live:
        raise InputError(
            f"A study must be at rest while it is copied, but {len(live)} live workers are in `{name}`. `hpo "
            f"pause {name}` has them leave."
        )


def _make_room(writing: sa.Connection, url: str, token: str, name: str) -> None:
    """Remove what a deleted study of that name has left; raise InputError where one is there."""
    present = sa.select(_STUDIES.c.study_id).where(_STUDIES.c.study_name == name)
    if writing.execute(present).first() is not None:
        same = sa.select(studies.c.name).where(studies.c.name == name, studies.c.token == token)
        if writing.execute(same).first() is not None:
            raise InputError(
                f"{redact(url)} holds the study `{name}` already, with the same checkpoints. Go on with that "
                "one, or name another database."
            )
        raise InputError(f"{redact(url)} has another study `{name}`. Name another database.")
    schema.delete_rows(writing, name)


def _copy_ours(reading: _Reading, writing: sa.Connection, row: dict[str, Any]) -> None:
    name = row["name"]
    writing.execute(sa.insert(studies), [row])
    for table in OURS:
        for chunk in reading.chunks(sa.select(table).where(table.c.study == name)):
            writing.execute(sa.insert(table), chunk)
    running = (slots.c.study == name, slots.c.state == "running")
    writing.execute(sa.update(slots).where(*running).values(state="open"))
    for chunk in reading.chunks(sa.select(workers).where(workers.c.study == name)):
        gone = [one | ({"state": "dead"} if one["state"] == "live" else {}) for one in chunk]
        writing.execute(sa.insert(workers), gone)


def _copy_optunas(reading: _Reading, writing: sa.Connection, name: str) -> int:
    """Copy the rows of Optuna's tables, which get the ids that are next in the target; count the trials."""
    study = reading.one(sa.select(_STUDIES).where(_STUDIES.c.study_name == name))
    made = sa.insert(_STUDIES).values(study_name=name).returning(_STUDIES.c.study_id)
    study_id = writing.execute(made).scalar_one()
    trial_ids: dict[int, int] = {}
    in_study = _TRIALS.c.study_id == study["study_id"]
    # In the order of their ids: by that, Optuna counts which trial is older.
    returned = sa.insert(_TRIALS).returning(_TRIALS.c.trial_id, sort_by_parameter_order=True)
    for chunk in reading.chunks(sa.select(_TRIALS).where(in_study).order_by(_TRIALS.c.trial_id)):
        old_ids = [one.pop("trial_id") for one in chunk]
        new_ids = writing.execute(returned, [one | {"study_id": study_id} for one in chunk]).scalars()
        trial_ids |= dict(zip(old_ids, new_ids, strict=True))
    for table in OF_STUDY:
        for chunk in reading.chunks(_in_order(table).where(table.c.study_id == study["study_id"])):
            rows = [_with_parents(_without_id(table, one), trial_ids) for one in chunk]
            writing.execute(sa.insert(table), [one | {"study_id": study_id} for one in rows])
    for table in OF_TRIAL:
        query = _in_order(table).join(_TRIALS, _TRIALS.c.trial_id == table.c.trial_id).where(in_study)
        for chunk in reading.chunks(query):
            rows = [_without_id(table, one) for one in chunk]
            writing.execute(
                sa.insert(table), [one | {"trial_id": trial_ids[one["trial_id"]]} for one in rows]
            )
    return len(trial_ids)


def _in_order(table: sa.Table) -> sa.Select[Any]:
    """All rows in the order in which they were made, which is that of a trial's parameters."""
    return sa.select(table).order_by(*table.primary_key)


def _without_id(table: sa.Table, row: dict[str, Any]) -> dict[str, Any]:
    own = {column.name for column in table.primary_key}
    return {key: value for key, value in row.items() if key not in own}


def _with_parents(row: dict[str, Any], trial_ids: Mapping[int, int]) -> dict[str, Any]:
    """A study's attribute, with the ids of the target's trials where NSGA-II keeps a generation's parents."""
    if not _PARENTS.fullmatch(str(row.get("key"))):
        return row
    return row | {"value_json": json.dumps([trial_ids[one] for one in json.loads(row["value_json"])])}
