"""Databases with and without a finished study."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.planted_comparison import lucky_score, searched

from hpo.config.study_config import StudyConfig
from hpo.study.store.storage import Storage, open_storage


@pytest.fixture
def empty(sqlite_url: str) -> Iterator[Storage]:
    with open_storage(sqlite_url) as opened:
        yield opened


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyConfig]:
    """Database with a finished study, for each test to copy."""
    path = tmp_path_factory.mktemp("searched") / "hpo.db"
    with open_storage(f"sqlite:///{path}") as storage:
        return path, searched(storage, lucky_score)


@pytest.fixture
def storage(finished: tuple[Path, StudyConfig], tmp_path: Path) -> Iterator[Storage]:
    with open_storage(f"sqlite:///{shutil.copy(finished[0], tmp_path / 'finished.db')}") as opened:
        yield opened


@pytest.fixture
def config(finished: tuple[Path, StudyConfig]) -> StudyConfig:
    return finished[1]
