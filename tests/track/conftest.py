from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mlflow_server import MlflowServer
from support.tracked_study import TrackedStudy


@pytest.fixture(scope="session")
def server_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    yield server
    server.stop()


@pytest.fixture
def mlflow_server(server_of_session: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    """A running server. A test may stop it."""
    server_of_session.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_of_session.url)
    return server_of_session


@pytest.fixture
def tracked(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TrackedStudy]:
    """A new study in the default database of `tmp_path`."""
    name = "".join(letter for letter in request.node.name if letter.isalnum())[:80]
    study = TrackedStudy(tmp_path, name)
    yield study
    study.storage.close()
