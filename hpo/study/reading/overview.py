"""The studies of a database, each in a few numbers, for `hpo studies`.

A handful of queries whatever the number of studies, each of which the database adds up: reading a study as
`reader` does takes seconds with thousands of trials.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from hpo.config.study_file import show
from hpo.errors import StorageError
from hpo.study.store.database import parse_url, snapshot, sqlite_path, storage_url
from hpo.study.store.schema import claims, studies
from hpo.study.store.storage import Storage, count_trials

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyOverview:
    """A study in numbers."""

    name: str
    state: str
    """`open`, `paused`, `cancelled`; `done` where it is open and each trial has ended."""
    trials: dict[str, int]
    """`open`, `running`, `done`, `paused` if any, and the `total`. `open` includes trials of dead workers."""
    workers: int
    created: float
    now: float
    """By the database's clock, as `created`: seconds since 1970."""

    def as_json(self) -> dict[str, Any]:
        created = datetime.fromtimestamp(self.created, UTC).isoformat(timespec="seconds")
        return {name: value for name, value in vars(self).items() if name != "now"} | {"created": created}


def list_studies(storage: Storage) -> list[StudyOverview]:
    """Every study of the database that hpo made, the newest last."""

    def read() -> list[StudyOverview]:
        with snapshot(storage.engine) as connection:
            now = float(connection.execute(sa.select(storage.now)).scalar_one())
            rows = storage.studies(connection)
            alive = storage.heard_workers(connection)
            counts = _counts(connection, alive)
        num_workers = Counter(worker.study for worker in alive.values())
        overviews = []
        for row in rows:
            trials = counts[row.name]
            unfinished = sum(trials.values()) - trials["done"]
            try:
                json.loads(row.definition)  # raises where the row is damaged
                overview = StudyOverview(
                    name=row.name,
                    state="done" if row.state == "open" and not unfinished else row.state,
                    trials={**trials, "total": sum(trials.values())},
                    workers=num_workers[row.name],
                    created=min(row.created, now),
                    now=now,
                )
            except (ValueError, TypeError) as error:
                say_damaged(row.name, f"{type(error).__name__}: {error}")
            else:
                overviews.append(overview)
        return overviews

    return storage.persist(read)


def glance(storage: str | None, name: str) -> tuple[dict[str, Any], dict[str, int]] | None:
    """Return the definition of a study and its numbers of trials; both are empty if it is not stored.

    It opens no network, changes nothing and does not wait. None: the study cannot be read like this.
    """
    try:
        path = sqlite_path(parse_url(storage_url(storage)))
        if path is None or not path.exists():
            return None if path is None else ({}, {})
        file = f"{path.absolute().as_uri()}?mode=ro"
        engine = sa.create_engine(
            "sqlite://", creator=lambda: sqlite3.connect(file, uri=True, timeout=0), poolclass=sa.NullPool
        )
        with engine.connect() as connection:
            of_study = studies.c.name == name
            definition = connection.execute(sa.select(studies.c.definition).where(of_study)).scalar()
            counts = count_trials(connection, of_study)
        return ({}, {}) if definition is None else (json.loads(definition), counts[name])
    except (StorageError, sa.exc.SQLAlchemyError, ValueError):
        return None


@lru_cache(maxsize=1024)
def say_damaged(name: str, reason: str) -> None:
    """Log, once, that the row of a study cannot be read."""
    _logger.warning("The study %s is left out: its row is damaged (%s).", show(name), reason)


def _counts(connection: sa.Connection, alive: Container[str]) -> dict[str, dict[str, int]]:
    """Return how many trials of each study are `open`, `running`, `done` and, if any, `paused`."""
    counts = count_trials(connection)
    query = sa.select(claims.c.study, claims.c.owner).where(claims.c.owner.is_not(None))
    for study, owner in connection.execute(query):
        if owner not in alive and study in counts:  # the trial waits for the next worker
            counts[study]["running"] -= 1
            counts[study]["open"] += 1
    return counts
