"""Databases with their tables for the tests of studies; their creation is slower than most tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpo.study.claims import snapshot
from hpo.study.store.storage import Storage, open_storage

SQL = ("test_leases", "test_lifecycle", "test_promotion", "test_reader", "test_storage", "test_workers")
"""Tests of queries: they use each kind of database, and the others use SQLite."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "database_kind" in metafunc.fixturenames:
        kinds: list[Any] = ["sqlite"]
        if metafunc.definition.path.stem in SQL:
            kinds.append(pytest.param("postgres", marks=pytest.mark.postgres))
        metafunc.parametrize("database_kind", kinds)


@pytest.fixture
def looks_for_dead_at_each_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "DEATH_CHECK_SECONDS", 0.0)


@pytest.fixture(scope="session")
def sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("made") / "hpo.db"
    open_storage(f"sqlite:///{file}").close()
    return file


@pytest.fixture(scope="session")
def postgres_template(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a PostgreSQL database."""
    with request.getfixturevalue("postgres_server").database() as url:
        open_storage(url).close()
        yield url.rpartition("/")[2]


@pytest.fixture
def storage(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """An open database."""
    if database_kind == "sqlite":
        file = shutil.copy(request.getfixturevalue("sqlite_file"), tmp_path / "hpo.db")
        with open_storage(f"sqlite:///{file}") as opened:
            yield opened
        return
    template = request.getfixturevalue("postgres_template")
    with request.getfixturevalue("postgres_server").database(template) as url, open_storage(url) as opened:
        yield opened
