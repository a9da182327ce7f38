"""What a worker does with a database is the same on PostgreSQL: `store`, `claims` and `faults` test that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpo.study.store.storage import Storage, open_storage


@pytest.fixture
def storage(sqlite_url: str) -> Iterator[Storage]:
    """A new database."""
    with open_storage(sqlite_url) as opened:
        yield opened
