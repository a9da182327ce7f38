"""A real MLflow server of `mlflow-skinny` on 127.0.0.1, and the content of its runs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from hpo.cluster.postgres.postgres_server import free_port
from support.waiting import wait_for


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
        wait_for(self._answers, check=self._check_process)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 15)  # uvicorn's workers too
            self._process.wait(30)
            self._process = None

    def _check_process(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient(os.environ["MLFLOW_TRACKING_URI"])


def experiment_of(name: str) -> str:
    return str(client().get_experiment_by_name(name).experiment_id)


def runs(name: str) -> dict[str, Any]:
    """Return the runs of an experiment's trials by name; check that the study's run is their parent."""
    found = all_runs(name)
    studies = {run["id"] for run in found.values() if run["tags"]["hpo.trial"].endswith("-study")}
    trials = {name: run for name, run in found.items() if run["id"] not in studies}
    assert len(studies) <= 1
    if studies:
        assert {run["tags"]["mlflow.parentRunId"] for run in trials.values()} <= studies
    return trials


def all_runs(name: str) -> dict[str, Any]:
    found = client().search_runs([experiment_of(name)], max_results=1000)
    content = {run.info.run_name: _content(run) for run in found}
    assert len(content) == len(found), "a name twice"
    return content


def _content(run: Any) -> dict[str, Any]:
    points = {
        name: [(p.step, p.value, p.timestamp) for p in client().get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    for name, history in points.items():
        assert len({step for step, _, _ in history}) == len(history), f"{name} has a step twice"
    times = (run.info.start_time, run.info.end_time)
    return {"id": run.info.run_id, "status": run.info.status, "times": times, "points": points} | {
        "params": dict(run.data.params),
        "tags": {name: value for name, value in run.data.tags.items() if name != "mlflow.runName"},
    }
