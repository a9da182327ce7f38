"""A guard that fails a test when a thread asks hpo's database for a second connection while it has one.

A pooler such as PgBouncer has few connections to its server. If each worker holds one in a transaction and
waits for another, all of them wait for ever.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import sqlalchemy as sa


@contextmanager
def one_connection() -> Iterator[None]:
    """Raise AssertionError in each thread that checks out a second connection of a pool that hpo creates."""
    create, held = sa.create_pool_from_url, threading.local()

    def check_out(_connection: object, record: Any, _proxy: object) -> None:
        assert not getattr(held, "record", None), "a second connection inside a transaction"
        held.record = record

    def check_in(_connection: object, record: Any) -> None:
        if getattr(held, "record", None) is record:
            held.record = None

    def guarded(*args: Any, **options: Any) -> sa.Pool:
        pool = create(*args, **options)
        sa.event.listen(pool, "checkout", check_out)
        sa.event.listen(pool, "checkin", check_in)
        return pool

    with mock.patch.object(sa, "create_pool_from_url", guarded):
        yield
