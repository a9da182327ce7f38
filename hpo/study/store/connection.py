"""Connections to PostgreSQL on which no call waits forever, however the network fails.

A connection whose other end is gone without a word gives no error by itself. Three bounds make one of it:

- the client's kernel asks for a sign of life (TCP keepalives), and waits for an acknowledgement for
  `tcp_user_timeout`;
- the client waits for an answer for `ANSWER_SECONDS`, where a proxy acknowledges what it does not deliver;
- the server ends a transaction in which its client is silent for `IDLE_SECONDS`, and frees its locks.

The last bound is set in each transaction. A setting of the session would stay with the server connection, and
a pooler such as PgBouncer gives that to other programs too.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg
import sqlalchemy as sa

ANSWER_SECONDS = 30.0
"""A statement of ours takes milliseconds; over a network that delays each packet by 0.5 s, about a second."""
IDLE_SECONDS = 45.0
"""A process that is stopped in a transaction loses its locks after this time, which is less than a lease."""
ASK_AFTER_SECONDS = 1.0
"""A connection that was used so lately is taken to work: to ask it first would cost a trial five calls."""

_ARGUMENTS = {
    "application_name": "hpo",
    "connect_timeout": 15,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    # A pooler such as PgBouncer gives the next transaction to a server connection without what was prepared.
    "prepare_threshold": None,
}


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that breaks when the server does not answer for `answer_seconds`."""

    answer_seconds = ANSWER_SECONDS

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        started = time.monotonic()
        try:
            return super().wait(gen, interval, self.answer_seconds if timeout is None else timeout)
        except psycopg.OperationalError:
            if time.monotonic() - started >= self.answer_seconds:
                self.close()  # in the middle of a query it is of no further use
            raise


def postgres_pool(url: sa.URL) -> sa.Pool:
    """A pool of bounded connections; what the URL says goes before the bounds above."""
    _, arguments = url.get_dialect()().create_connect_args(url)

    def connect() -> psycopg.Connection[Any]:
        return BoundedConnection.connect(**{**_ARGUMENTS, **arguments})

    pool = sa.create_pool_from_url(url, creator=connect)
    sa.event.listen(pool, "checkin", _note_use)
    sa.event.listen(pool, "checkout", _ask_after_a_pause)
    return pool


def bound_transaction(connection: sa.Connection) -> None:
    """Let the server end the transaction that begins if its client is silent for `IDLE_SECONDS`."""
    milliseconds = round(IDLE_SECONDS * 1000)
    connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds}")


def _note_use(_connection: object, record: Any) -> None:
    record.info["used"] = time.monotonic()


def _ask_after_a_pause(connection: Any, record: Any, _proxy: object) -> None:
    """As the pool's `pre_ping`, but not of a connection that has just worked."""
    used = record.info.get("used")  # None: it is new
    if used is None or time.monotonic() - used < ASK_AFTER_SECONDS:
        return
    try:
        connection.execute("SELECT 1")
        connection.rollback()
    except psycopg.Error as error:
        raise sa.exc.InvalidatePoolError from error  # SQLAlchemy connects anew
