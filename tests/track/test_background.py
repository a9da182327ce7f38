from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import hpo_command, ok, stored
from support.tiny import write_study

from hpo.track import background


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


SHORT: dict[str, Any] = {"n_trials": 1, "tracker": "mlflow"}


def test_run_leaves_silent_tracker(
    tmp_path: Path, silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent_server)
    monkeypatch.setattr(background, "LEAVE_SECONDS", 1.0)
    write_study(tmp_path, **SHORT)
    finished = ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    assert "The tracker mlflow: it took longer than 1 s." in finished.err
    assert "To show what is missing there, run `hpo track tiny --to mlflow`." in finished.err
    assert stored(tmp_path).trials[0].outcome == "complete"
