from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpo.study.store.storage import Storage, open_storage


@pytest.fixture
def storage(storage_url: str) -> Iterator[Storage]:
    """An open database of each supported kind."""
    with open_storage(storage_url) as opened:
        yield opened
