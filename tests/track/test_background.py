from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
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


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(401, "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."), (403, "permission EDIT")],
)
def test_run_reports_refused_user_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, remedy: str
) -> None:
    with refusing_server(status) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        write_study(tmp_path, **SHORT | {"n_trials": 2})
        finished = ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    assert finished.err.count(remedy) == 1
    assert "To show what is missing there, run `hpo track tiny --to mlflow`." in finished.err
    assert [trial.outcome for trial in stored(tmp_path).trials] == ["complete", "complete"]


@contextmanager
def refusing_server(status: int) -> Iterator[str]:
    """Start a server with this status in each answer."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"Permission denied"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
