"""Private PostgreSQL servers in folders of their own."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpo.cluster.postgres.postgres_server import PostgresServer


def make_folder() -> Path:
    """A folder that other users may enter; those of pytest are closed to them."""
    made = Path(tempfile.mkdtemp(prefix="hpo-test-"))
    made.chmod(0o777)
    return made


@pytest.fixture
def folder() -> Iterator[Path]:
    made = make_folder()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def made_database() -> Iterator[Path]:
    """The folder of a database that was never started."""
    made = make_folder()
    (made / "postgres").mkdir(mode=0o711)
    PostgresServer(made / "postgres").prepare()
    yield made / "postgres"
    shutil.rmtree(made)


@pytest.fixture
def new_server(folder: Path) -> Iterator[PostgresServer]:
    """The server of a database that is not made yet."""
    server = PostgresServer(folder / "postgres", {"fsync": "off"})
    yield server
    server.stop()


@pytest.fixture
def server(new_server: PostgresServer, folder: Path, made_database: Path) -> PostgresServer:
    """The server of a database that is a copy: to make one takes seconds."""
    subprocess.run(["cp", "-a", made_database, folder], check=True)  # with its owner
    return new_server
