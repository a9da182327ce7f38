"""Fixtures of the training loop."""

import pytest
from support.tiny import tiny_executor

from hpo.trial.executor import Executor


@pytest.fixture(scope="session")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return tiny_executor(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a settable `time.perf_counter`."""
    time = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: time[0])
    return time
