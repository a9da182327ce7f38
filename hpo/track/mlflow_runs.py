"""Runs of MLflow: an experiment named like the study, with one run for the study and a child run per trial.

Two commands may both create the run of a trial. Each then keeps the run with the first id and deletes the
others. The run itself shows which evaluations it has: its `marker` is the last metric to be written. MLflow
refuses another value of a param, so a param keeps its first value.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa
from alembic.util import CommandError
from filelock import FileLock
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from hpo.errors import InputError, TrackerError, shorten
from hpo.redaction import redact, without_secrets
from hpo.study.store.database import sqlite_path
from hpo.track.runs import Run

ADDRESS = "MLFLOW_TRACKING_URI"
KEY, STUDY, DIGEST = "hpo.trial", "hpo.study", "hpo.digest"
"""Tags of a run: its trial, its study and the digest of its content."""
_STATUS = {
    "running": "RUNNING",
    "waiting": "SCHEDULED",
    "finished": "FINISHED",
    "stopped": "KILLED",
    "failed": "FAILED",
}
# By default MLflow waits minutes for an unreachable server, prints its progress, and reports usage.
_DEFAULTS = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
MAX_PARAMS, MAX_METRICS = 100, 900
"""MLflow's limits for one request: params or tags, and metrics; together 1000."""


@dataclass
class _Known:
    run_id: str
    digest: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    params: set[str] = field(default_factory=set)
    steps: set[int] | None = None  # steps of the run's points; None: not read yet


class MlflowTracker:
    """Raises InputError if MLFLOW_TRACKING_URI is missing. `show` raises it if the variable is no address."""

    def __init__(self, study: str, token: str) -> None:
        address = os.environ.get(ADDRESS)
        if not address:
            raise InputError(f"{ADDRESS} must say where MLflow is, e.g. http://127.0.0.1:5000. Set it.")
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._new_client = MlflowClient
        self._client: Any = None
        self._address, self._token = redact(address), token
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or study
        self._experiment_id = ""
        self._known: dict[str, _Known] = {}

    @property
    def where(self) -> str:
        page = f"/#/experiments/{self._experiment_id}/runs" if self._address.startswith("http") else ""
        return f"{self._address}{page}, experiment {self._experiment}"

    def show(self, run: Run, write_files: Callable[[Path], None] | None = None, /) -> bool:
        with self._errors_explained():
            self._connect()
            known = self._find(run)
            if known.digest == run.digest:
                return False
            try:
                self._send(known, run)
                if write_files:
                    with TemporaryDirectory() as folder:
                        write_files(Path(folder))
                        self._client.log_artifacts(known.run_id, folder)
                self._send_tags(known, run)
            except Exception:
                self._experiment_id = ""  # read all again: a person or another command may have deleted it
                raise
            return True

    def close(self) -> None:
        """Do nothing: no run is open."""

    def _connect(self) -> None:
        """Create the client. If the address is a database, this creates or migrates its tables."""
        if self._client is None:
            address = os.environ[ADDRESS]
            # Two processes that create the tables of a SQLite file at once damage it.
            path = sqlite_path(sa.make_url(address)) if address.startswith("sqlite:") else None
            if path is not None and not path.parent.is_dir():  # FileLock would create it
                raise InputError(
                    f"{ADDRESS}: the folder `{path.parent}` must exist. Make it, or name another."
                )
            with FileLock(f"{path}.lock") if path else nullcontext():
                self._client = self._new_client(tracking_uri=address)

    def _send(self, known: _Known, run: Run) -> None:
        from mlflow.entities import Metric, Param

        if known.steps is None:
            history = self._client.get_metric_history(known.run_id, run.marker)
            known.steps = {metric.step for metric in history}
        new = [point for point in run.points if point.step not in known.steps]
        metrics = [
            Metric(name, value, int(point.time * 1000), point.step)
            for point in new
            for name, value in point.metrics.items()
        ]
        end, last = int((run.ended or run.started) * 1000), run.points[-1].step if run.points else 0
        results = {name: value for name, value in run.results.items() if known.metrics.get(name) != value}
        metrics += [Metric(name, value, end, last) for name, value in results.items()]
        params = {name: str(value) for name, value in run.params.items() if name not in known.params}
        left = [Param(*item) for item in params.items()]
        while metrics or left:  # in few requests: a server with passwords needs long for each
            self._client.log_batch(known.run_id, metrics=metrics[:MAX_METRICS], params=left[:MAX_PARAMS])
            metrics, left = metrics[MAX_METRICS:], left[MAX_PARAMS:]
        if run.ended is None:
            self._client.update_run(known.run_id, status=_STATUS[run.status])
        else:
            self._client.set_terminated(known.run_id, _STATUS[run.status], end)
        known.steps |= {point.step for point in new}
        known.metrics |= results
        known.params |= params.keys()

    def _send_tags(self, known: _Known, run: Run) -> None:
        """Set the tags. The last tag is the digest, after all other content."""
        from mlflow.entities import RunTag

        tags = {**run.facts, "mlflow.runName": run.name}
        if run.study:
            tags["mlflow.parentRunId"] = self._find(run.study).run_id
        left = [RunTag(*item) for item in {**tags, DIGEST: run.digest}.items()]
        while left:
            self._client.log_batch(known.run_id, tags=left[:MAX_PARAMS])
            left = left[MAX_PARAMS:]
        known.digest = run.digest

    def _find(self, run: Run) -> _Known:
        if not self._experiment_id:
            experiment = self._find_experiment()
            self._known = self._search(experiment)
            self._experiment_id = experiment
        if run.key not in self._known:
            tags = {KEY: run.key, STUDY: self._token, "mlflow.source.name": "hpo"}
            start = int(run.started * 1000)
            self._client.create_run(self._experiment_id, start_time=start, tags=tags, run_name=run.name)
            self._known |= self._search(self._experiment_id, run.key)
        return self._known[run.key]

    def _search(self, experiment: str, key: str = "") -> dict[str, _Known]:
        """Read the runs of the study, or the run of `key`; delete all but the first run of a trial."""
        condition = f"tags.`{KEY}` = '{key}'" if key else f"tags.`{STUDY}` = '{self._token}'"
        runs: dict[str, list[Any]] = {}
        page = None
        while page != "":
            found = self._client.search_runs([experiment], condition, max_results=500, page_token=page)
            for run in found:
                runs.setdefault(run.data.tags.get(KEY, ""), []).append(run)
            page = found.token or ""
        known = {}
        for key, same in runs.items():
            first, *others = sorted(same, key=lambda run: run.info.run_id)
            for run in others:
                self._client.delete_run(run.info.run_id)
            metrics, digest = dict(first.data.metrics), first.data.tags.get(DIGEST, "")
            steps = None if metrics else set[int]()
            known[key] = _Known(first.info.run_id, digest, metrics, set(first.data.params), steps)
        return known

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except MlflowException:  # another command has just created it, or it cannot be created
                experiment = self._client.get_experiment_by_name(self._experiment)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            raise InputError(
                f"The experiment `{self._experiment}` of {self._address} is deleted. Restore it there, or "
                "name another one in MLFLOW_EXPERIMENT_NAME."
            )
        return str(experiment.experiment_id)

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException

        try:
            yield
        except (UnsupportedModelRegistryStoreURIException, ArgumentError) as error:
            message = shorten(without_secrets(str(error)), 300)
            raise InputError(
                f"{ADDRESS} must say where MLflow is, e.g. http://127.0.0.1:5000, but is {self._address}. "
                f"Correct it. ({message})"
            ) from error
        except (MlflowException, SQLAlchemyError, CommandError, OSError, ImportError) as error:
            message = shorten(without_secrets(str(error)), 300)
            raise TrackerError(f"MLflow at {self._address} {self._meaning(error)} ({message})") from error

    def _meaning(self, error: Exception) -> str:
        status = _status_of(error)
        if status == 401:
            return "must know this user. Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        if status == 403:
            return (
                f"must let this user edit the experiment `{self._experiment}`. Ask its owner for the "
                "permission EDIT, or name another experiment in MLFLOW_EXPERIMENT_NAME."
            )
        if status < 500:
            return "refused the request. Correct what the brackets name, and run `hpo track` again."
        return "did not answer. Check that the server runs and that MLFLOW_TRACKING_URI is right."


def _status_of(error: Any) -> int:
    """Return the HTTP status of an error of MLflow, or of `requests` for artifacts."""
    if isinstance(error, ImportError):  # the store of the artifacts needs another library
        return 400
    if hasattr(error, "get_http_status_code"):
        return int(error.get_http_status_code())
    # A locked database, or one in creation, counts as unreachable.
    return int(getattr(getattr(error, "response", None), "status_code", 500))
