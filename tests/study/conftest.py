from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hpo
from hpo.study.storage import Storage, open_storage


@pytest.fixture
def storage(storage_url: str) -> Iterator[Storage]:
    with open_storage(storage_url) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _package_for_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(hpo.__file__).parents[1]))
