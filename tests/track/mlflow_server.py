"""A real MLflow server on 127.0.0.1: the one of `mlflow-skinny`, or a full one with users and passwords.

The full one needs `mlflow[auth]` in an environment of its own: HPO_TEST_MLFLOW_PYTHON names the Python there.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from hpo.cluster.postgres.postgres_server import free_port

FULL_PYTHON = "HPO_TEST_MLFLOW_PYTHON"
ADMIN = ("admin", "password-of-admin")
_AUTH = f"""\
[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///{{folder}}/users.db
admin_username = {ADMIN[0]}
admin_password = {ADMIN[1]}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
"""


class MlflowServer:
    """One server with its database in `folder`; `start` after `stop` brings it back on the same port."""

    def __init__(self, folder: Path, *, with_users: bool = False) -> None:
        self._folder = folder
        self._port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._python, self._options = sys.executable, ["--workers", "1"]
        self._environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        if with_users:
            config = folder / "auth.ini"
            config.write_text(_AUTH.format(folder=folder))
            self._python = os.environ[FULL_PYTHON]
            self._options += ["--app-name", "basic-auth"]
            self._environment |= {"MLFLOW_AUTH_CONFIG_PATH": str(config), "PYTHONPATH": ""}
            self._environment["MLFLOW_FLASK_SERVER_SECRET_KEY"] = "of the test"

    def start(self) -> None:
        if self._process is not None:
            return
        place = ["--host", "127.0.0.1", "--port", str(self._port), *self._options]
        store = ["--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", "mlflow", "server", *store, *place],
                cwd=self._folder,
                env={**os.environ, **self._environment},
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

    def post(self, method: str, **content: str) -> None:
        """Call a method, such as `2.0/mlflow/users/create`, as the administrator."""
        login = base64.b64encode(":".join(ADMIN).encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        body = json.dumps(content).encode()
        with urlopen(Request(f"{self.url}/api/{method}", body, headers), timeout=30):
            pass

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=5):
                return True
        except (URLError, OSError):
            return False
