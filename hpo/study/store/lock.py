"""A lock on a whole database, held by one transaction at a time.

The tables are created once, and workers get consecutive numbers, so both happen under this lock. The lock
lives exactly as long as a transaction: PostgreSQL has advisory locks for that, and SQLite has one writer. All
work under the lock uses the connection that holds it. A second connection could wait forever behind a pooler
with few connections. A waiting process asks again in a new transaction, and holds no connection in between.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from hpo.errors import StoppedError
from hpo.study.store import connection as bounds
from hpo.study.store.failures import is_locked

_RANDOM = random.SystemRandom()  # the generator of `random` belongs to training loops
_POSTGRES_LOCK = 0x68706F  # PostgreSQL's advisory locks are numbers: "hpo"


@contextmanager
def exclusive(engine: sa.Engine, stop: threading.Event | None = None) -> Iterator[sa.Connection]:
    """Yield a connection in a transaction that holds the lock; the lock ends with the block.

    Raises StoppedError if `stop` is set while another process holds the lock. On SQLite it raises
    OperationalError if the database stays locked for `BUSY_SECONDS`.
    """
    deadline = time.monotonic() + bounds.BUSY_SECONDS
    while True:
        with engine.begin() as connection:
            if _lock(connection, deadline):
                yield connection
                return
        if (stop or threading.Event()).wait(_RANDOM.uniform(0.01, 0.1)):
            raise StoppedError("told to stop while another process had the database to itself.")


def _lock(connection: sa.Connection, deadline: float) -> bool:
    """Acquire the lock if it is free; return true if this transaction has it."""
    if connection.dialect.name == "postgresql":
        lock = sa.select(sa.func.pg_try_advisory_xact_lock(_POSTGRES_LOCK))
        return bool(connection.execute(lock).scalar_one())
    connection.exec_driver_sql("PRAGMA busy_timeout = 0")  # SQLite's own wait would not notice `stop`
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except sa.exc.OperationalError as error:
        if not is_locked(error) or time.monotonic() > deadline:
            raise
        return False
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {bounds.BUSY_SECONDS * 1000:.0f}")
    return True
