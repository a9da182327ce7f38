"""Connections to SQLite and PostgreSQL. No call waits forever, however the network fails.

A connection to PostgreSQL gives no error by itself if its other end vanishes silently. The client's kernel
asks for a sign of life (TCP keepalives, `tcp_user_timeout`). The client waits for an answer for
`ANSWER_SECONDS`, because a proxy may acknowledge a message and not deliver it. The server ends a transaction
whose client is silent for `IDLE_SECONDS`, and frees its locks. This is set in each transaction: a pooler such
as PgBouncer gives the server connection, with the settings of its session, to other programs too.
"""

import sqlite3
import time
from typing import Any

import psycopg
import sqlalchemy as sa

BUSY_SECONDS = 60.0  # longest wait for another program's lock on a SQLite database
ANSWER_SECONDS = 30.0
"""A statement takes milliseconds; over a network that delays each packet by 0.5 s, about a second."""
IDLE_SECONDS = 45.0
"""A process stopped in a transaction loses its locks after this time, before its lease ends."""
PING_AFTER_SECONDS = 1.0
"""A connection used more recently is assumed to work: pings would cost a trial five calls."""

_ARGUMENTS = {
    "application_name": "hpo",
    "connect_timeout": 15,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    # A pooler gives the next transaction to another server connection, without the prepared statements.
    "prepare_threshold": None,
}


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that breaks if the server does not answer for `answer_seconds`."""

    answer_seconds = ANSWER_SECONDS

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        started = time.monotonic()
        try:
            return super().wait(gen, interval, self.answer_seconds if timeout is None else timeout)
        except psycopg.OperationalError:
            if time.monotonic() - started >= self.answer_seconds:
                self.close()  # in the middle of a query it is of no further use
            raise


def connection_pool(url: sa.URL) -> sa.Pool:
    """Return a pool of connections. Options in the URL of a PostgreSQL server override the bounds above."""
    if url.get_backend_name() == "sqlite":
        pool = sa.create_pool_from_url(url, connect_args={"timeout": BUSY_SECONDS})
        sa.event.listen(pool, "connect", _set_up_sqlite)
        return pool
    _, arguments = url.get_dialect()().create_connect_args(url)

    def connect() -> psycopg.Connection[Any]:
        return BoundedConnection.connect(**{**_ARGUMENTS, **arguments})

    pool = sa.create_pool_from_url(url, creator=connect)
    sa.event.listen(pool, "checkin", _note_use)
    sa.event.listen(pool, "checkout", _ping_after_a_pause)
    return pool


def bound_transaction(connection: sa.Connection) -> None:
    """Let the server end the new transaction if its client is silent for `IDLE_SECONDS`."""
    milliseconds = round(IDLE_SECONDS * 1000)
    connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds}")


def _note_use(_connection: object, record: Any) -> None:
    record.info["used"] = time.monotonic()


def _ping_after_a_pause(connection: Any, record: Any, _proxy: object) -> None:
    """Ping a connection (the pool's `pre_ping`), unless it is new or has just worked."""
    used = record.info.get("used")
    if used is None or time.monotonic() - used < PING_AFTER_SECONDS:
        return
    try:
        connection.execute("SELECT 1")
        connection.rollback()
    except psycopg.Error as error:
        raise sa.exc.InvalidatePoolError from error  # SQLAlchemy connects anew


def _set_up_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # With a write-ahead log readers never wait for the writer, and a commit needs no fsync: a power cut may
    # lose the last commits, never the database (https://www.sqlite.org/pragma.html#pragma_synchronous).
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            break
        except sqlite3.OperationalError as error:  # SQLite does not wait here for another process
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous=NORMAL").close()
