"""The studies of a database, each in a few numbers, for `hpo studies`.

The database adds up the numbers in a few queries, because `reader` takes seconds for thousands of trials.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from hpo.study.store.database import snapshot
from hpo.study.store.storage import Storage, count_trials


@dataclass(frozen=True)
class StudyOverview:
    name: str
    state: str  # `open`, `paused`, `cancelled`; `done` if it is open and all trials have ended
    trials: dict[str, int]
    """`open`, `running`, `done`, `paused` if any, and the `total`; see `count_trials`."""
    workers: int
    created: float
    now: float  # seconds since 1970 by the database's clock, like `created`

    def as_json(self) -> dict[str, Any]:
        created = datetime.fromtimestamp(self.created, UTC).isoformat(timespec="seconds")
        return {name: value for name, value in vars(self).items() if name != "now"} | {"created": created}


def list_studies(storage: Storage) -> list[StudyOverview]:
    """Return every study that hpo made in the database, the newest last."""

    def read() -> list[StudyOverview]:
        with snapshot(storage.engine) as connection:
            now = float(connection.execute(sa.select(storage.now)).scalar_one())
            rows = storage.studies(connection)
            alive = storage.heard_workers(connection)
            counts = count_trials(connection, alive=alive)
        num_workers = Counter(worker.study for worker in alive.values())
        return [_overview(row, counts[row.name], num_workers[row.name], now) for row in rows]

    return storage.persist(read)


def _overview(row: sa.Row[Any], trials: dict[str, int], num_workers: int, now: float) -> StudyOverview:
    total = sum(trials.values())
    state = "done" if row.state == "open" and trials["done"] == total else row.state
    created = min(row.created, now)
    return StudyOverview(row.name, state, {**trials, "total": total}, num_workers, created, now)
