"""What a database holds, study by study: for `hpo studies`, and for workers that choose one.

A handful of queries whatever the number of studies, each of which the database adds up: reading a study as
`reader` does takes seconds with thousands of trials.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from optuna.storages._rdb import models
from optuna.trial import TrialState

from hpo.study.database import snapshot
from hpo.study.process import is_alive
from hpo.study.schema import slots, studies, workers
from hpo.study.storage import TOKEN_ATTR

if TYPE_CHECKING:
    from hpo.study.storage import Storage


@dataclass(frozen=True)
class StudyOverview:
    """A study in numbers."""

    name: str
    state: str
    """`open`, `paused`, `cancelled`; `done` where it is open and each trial has ended."""
    priority: int
    trials: dict[str, int]
    """`open`, `running`, `done` and the `total`; one whose worker died counts as open."""
    metric: str
    """The first objective."""
    best: float | None
    """Its best value; None before the first complete trial."""
    workers: int
    """That live."""
    created: float
    last_activity: float
    """When one of its workers was last seen, or it was made."""
    now: float
    """By the database's clock, as these are: seconds since 1970."""


def list_studies(storage: Storage) -> list[StudyOverview]:
    """Every study of the database that hpo made, the newest last."""

    def read() -> list[StudyOverview]:
        with snapshot(storage.engine) as connection:
            now = float(connection.execute(sa.select(storage.now)).scalar_one())
            rows = _studies(connection)
            alive = _alive(storage, connection)
            progress = _progress(connection, alive)
            best = _best_values(connection)
            seen = sa.select(workers.c.study, sa.func.max(workers.c.last_seen)).group_by(workers.c.study)
            last_seen = {row[0]: float(row[1]) for row in connection.execute(seen)}
        return [
            StudyOverview(
                name=row.name,
                state="done" if row.state == "open" and not progress[row.name].unfinished else row.state,
                priority=row.priority,
                trials=progress[row.name].counts,
                metric=json.loads(row.definition)["objective"][0]["metric"],
                best=best.get(row.name),
                workers=len(alive[row.name]),
                created=row.created,
                last_activity=max(row.created, last_seen.get(row.name, 0.0)),
                now=now,
            )
            for row in rows
        ]

    return storage.persist(read)


@dataclass(frozen=True)
class Demand:
    """An open study with unfinished trials, as a worker sees it that looks for one."""

    name: str
    token: str
    n_trials: int
    priority: int
    free_slots: int
    """That a worker could claim now, less the workers in the study that have none."""
    workers: tuple[Any, ...]
    """The rows of those that live."""


def demands(storage: Storage, connection: sa.Connection) -> list[Demand]:
    """The open studies with unfinished trials, the oldest first."""
    rows = _studies(connection, studies.c.state == "open")
    alive = _alive(storage, connection)
    progress = _progress(connection, alive, studies.c.state == "open")
    return [
        Demand(
            name=row.name,
            token=row.token,
            n_trials=row.n_trials,
            priority=row.priority,
            free_slots=progress[row.name].free - (len(alive[row.name]) - progress[row.name].running),
            workers=tuple(alive[row.name].values()),
        )
        for row in rows
        if progress[row.name].unfinished
    ]


@dataclass
class _Progress:
    free: int = 0
    running: int = 0
    done: int = 0

    @property
    def unfinished(self) -> int:
        return self.free + self.running

    @property
    def counts(self) -> dict[str, int]:
        total = self.unfinished + self.done
        return {"open": self.free, "running": self.running, "done": self.done, "total": total}


def _studies(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[sa.Row[Any]]:
    """The rows of the studies, the oldest first; not those whose Optuna study was deleted."""
    made, attributes = models.StudyModel.__table__, models.StudySystemAttributeModel.__table__
    tokens = (
        sa.select(made.c.study_name, attributes.c.value_json)
        .join(attributes, attributes.c.study_id == made.c.study_id)
        .where(attributes.c.key == TOKEN_ATTR)
    )
    token_of = {name: json.loads(value) for name, value in connection.execute(tokens)}
    query = sa.select(studies).where(*conditions).order_by(studies.c.created, studies.c.name)
    return [row for row in connection.execute(query) if token_of.get(row.name) == row.token]


def _alive(storage: Storage, connection: sa.Connection) -> dict[str, dict[str, Any]]:
    """The live workers of each study, by their ids."""
    alive: dict[str, dict[str, Any]] = defaultdict(dict)
    query = sa.select(workers, *storage.clock).where(workers.c.state == "live")
    for row in connection.execute(query):
        if is_alive(row, storage.lease_seconds):
            alive[row.study][row.id] = row
    return alive


def _progress(
    connection: sa.Connection, alive: dict[str, dict[str, Any]], *conditions: sa.ColumnElement[bool]
) -> dict[str, _Progress]:
    """The slots of each study."""
    found: dict[str, _Progress] = defaultdict(_Progress)
    of_these = slots.c.study.in_(sa.select(studies.c.name).where(*conditions)) if conditions else sa.true()
    counts = sa.select(slots.c.study, slots.c.state, sa.func.count()).where(of_these)
    for study, state, count in connection.execute(counts.group_by(slots.c.study, slots.c.state)):
        if state != "running":
            setattr(found[study], "done" if state == "done" else "free", count)
    owners = sa.select(slots.c.study, slots.c.owner).where(of_these, slots.c.state == "running")
    for study, owner in connection.execute(owners):
        if owner in alive[study]:
            found[study].running += 1
        else:  # its worker died: the next one takes it over
            found[study].free += 1
    return found


def _best_values(connection: sa.Connection) -> dict[str, float]:
    """The best value of the first objective of each study that has a complete trial."""
    made, trials = models.StudyModel.__table__, models.TrialModel.__table__
    directions, values = models.StudyDirectionModel.__table__, models.TrialValueModel.__table__
    query = (
        sa.select(
            made.c.study_name,
            directions.c.direction,
            sa.func.min(values.c.value),
            sa.func.max(values.c.value),
        )
        .join(directions, sa.and_(directions.c.study_id == made.c.study_id, directions.c.objective == 0))
        .join(trials, sa.and_(trials.c.study_id == made.c.study_id, trials.c.state == TrialState.COMPLETE))
        .join(values, sa.and_(values.c.trial_id == trials.c.trial_id, values.c.objective == 0))
        .group_by(made.c.study_name, directions.c.direction)
    )
    return {
        name: float(highest if direction.name == "MAXIMIZE" else lowest)
        for name, direction, lowest, highest in connection.execute(query)
    }
