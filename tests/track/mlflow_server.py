"""A real MLflow server of `mlflow-skinny` on 127.0.0.1."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from hpo.cluster.postgres.postgres_server import free_port


class MlflowServer:
    """A server with its database in `folder`. It keeps its port after `stop` and `start`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        place = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        store = ["--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *store, *place],
                cwd=self._folder,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + 120
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 15)  # uvicorn's workers too
            self._process.wait(30)
            self._process = None

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=5):
                return True
        except (URLError, OSError):
            return False
