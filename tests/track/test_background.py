import socket
from pathlib import Path

import pytest
from support.command_line import hpo_command, ok, stored
from support.tiny import write_study

from hpo.track import background


def test_run_leaves_silent_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts connections and never answers."""
    monkeypatch.setattr(background, "LEAVE_SECONDS", 1.0)
    write_study(tmp_path, n_trials=1, tracker="mlflow")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        finished = ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    assert "The tracker mlflow: it took longer than 1 s." in finished.err
    assert "To show what is missing there, run `hpo track tiny --to mlflow`." in finished.err
    assert stored(tmp_path).trials[0].outcome == "complete"
