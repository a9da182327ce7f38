"""Runs of MLflow: an experiment of the study's name, with a run for the study and
one below it for each trial.

Two commands may both make the run of a trial. Each then keeps the one with the first id and deletes the
others. Whether an evaluation is in a run is read from the run itself: the `marker` is the last metric that is
written. MLflow refuses another value of a param, so a param of an earlier call keeps its value.
"""

from __future__ import annotations

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
from hpo.track.runs import FACTS, Point, Run, fact_names

ADDRESS = "MLFLOW_TRACKING_URI"
KEY, STUDY, DIGEST = "hpo.trial", "hpo.study", "hpo.digest"
"""Tags of a run: its trial, its study and the state that it shows."""
_STATUS = {
    "running": "RUNNING",
    "waiting": "SCHEDULED",
    "finished": "FINISHED",
    "stopped": "KILLED",
    "failed": "FAILED",
}
# MLflow by default waits minutes for a server that is away, prints and logs its progress, and reports to its
# makers.
_DEFAULTS = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
MAX_PARAMS, MAX_METRICS = 100, 900
"""The limits of MLflow for the params, or the tags, and the metrics of one request; together 1000."""


@dataclass
class _Known:
    """What MLflow has of a trial."""

    run_id: str
    digest: str = ""
    results: dict[str, float] = field(default_factory=dict)
    params: set[str] = field(default_factory=set)
    facts: set[str] = field(default_factory=set)
    steps: set[int] | None = None
    """The steps of its points; None: they were not asked for yet."""


class MlflowTracker:
    """Raises InputError where MLFLOW_TRACKING_URI is not set; `show` does where it is no address."""

    def __init__(self, study: str, token: str) -> None:
        address = os.environ.get(ADDRESS)
        if not address:
            raise InputError(f"{ADDRESS} must say where MLflow is, e.g. http://127.0.0.1:5000. Set it.")
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._new_client = MlflowClient
        self._client: Any = None
        """None: nothing was asked yet."""
        self._address, self._token = redact(address), token
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or study
        self._experiment_id = ""
        """Empty: it was not asked for yet."""
        self._known: dict[str, _Known] = {}

    @property
    def where(self) -> str:
        page = f"/#/experiments/{self._experiment_id}/runs" if self._address.startswith("http") else ""
        return f"{self._address}{page}, experiment {self._experiment}"

    def show(self, run: Run, write_files: Callable[[Path], None] | None = None, /) -> bool:
        with self._asking():
            self._connect()
            known = self._find(run)
            if known.digest == run.digest:
                return False
            try:
                self._bring(known, run)
                if write_files:
                    with TemporaryDirectory() as folder:
                        write_files(Path(folder))
                        self._client.log_artifacts(known.run_id, folder)
                self._finish(known, run)
            except Exception:
                self._experiment_id = ""  # the run may be gone: deleted by a person, or by another command
                raise
            return True

    def close(self) -> None:
        """Nothing is open."""

    def _connect(self) -> None:
        """Make the client, which makes or migrates the tables where the address is that of a database."""
        if self._client is None:
            address = os.environ[ADDRESS]
            # Two that make the tables of a SQLite file at once leave one that MLflow never opens again.
            path = sqlite_path(sa.make_url(address)) if address.startswith("sqlite:") else None
            if path is not None and not path.parent.is_dir():  # FileLock would make it
                raise InputError(
                    f"{ADDRESS}: the folder `{path.parent}` must exist. Make it, or name another."
                )
            with FileLock(f"{path}.lock") if path else nullcontext():
                self._client = self._new_client(tracking_uri=address)

    def _bring(self, known: _Known, run: Run) -> None:
        from mlflow.entities import Param

        if known.steps is None:
            history = self._client.get_metric_history(known.run_id, run.marker)
            known.steps = {metric.step for metric in history}
        new = [point for point in run.points if point.step not in known.steps]
        at = (int((run.ended or run.started) * 1000), run.points[-1].step if run.points else 0)
        results = {name: value for name, value in run.results.items() if known.results.get(name) != value}
        metrics = [metric for point in new for metric in _metrics(point)]
        metrics += [_metric(name, value, *at) for name, value in results.items()]
        params = {name: str(value) for name, value in run.params.items() if name not in known.params}
        self._log(known.run_id, metrics, [Param(*item) for item in params.items()])
        if run.ended is None:
            self._client.update_run(known.run_id, status=_STATUS[run.status])
        else:
            self._client.set_terminated(known.run_id, _STATUS[run.status], int(run.ended * 1000))
        known.steps |= {point.step for point in new}
        known.results |= results
        known.params |= params.keys()

    def _log(self, run_id: str, metrics: list[Any], params: list[Any]) -> None:
        """Send all in as few requests as possible: a server with passwords takes long for each."""
        while metrics or params:
            self._client.log_batch(run_id, metrics=metrics[:MAX_METRICS], params=params[:MAX_PARAMS])
            metrics, params = metrics[MAX_METRICS:], params[MAX_PARAMS:]

    def _finish(self, known: _Known, run: Run) -> None:
        """Set the tags. The last one notes the state that the run shows, after all of it is there."""
        from mlflow.entities import RunTag
        from mlflow.exceptions import MlflowException

        for name in known.facts - run.facts.keys():  # no longer true, such as the reason of a pause
            try:
                self._client.delete_tag(known.run_id, name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # another command has deleted it
                    raise
        known.facts = set(run.facts)
        tags = {**run.facts, "mlflow.runName": run.name, FACTS: ",".join(run.facts)}
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
            at = int(run.started * 1000)
            self._client.create_run(self._experiment_id, start_time=at, tags=tags, run_name=run.name)
            self._known |= self._search(self._experiment_id, run.key)
        return self._known[run.key]

    def _search(self, experiment: str, key: str = "") -> dict[str, _Known]:
        """The runs of the study's trials, or of one of them, by their keys; of several of a trial one."""
        condition = f"tags.`{KEY}` = '{key}'" if key else f"tags.`{STUDY}` = '{self._token}'"
        found: dict[str, list[Any]] = {}
        page = None
        while page != "":
            runs = self._client.search_runs([experiment], condition, max_results=500, page_token=page)
            for run in runs:
                found.setdefault(run.data.tags.get(KEY, ""), []).append(run)
            page = runs.token or ""
        for same in found.values():
            same.sort(key=lambda run: run.info.run_id)
            for run in same[1:]:
                self._client.delete_run(run.info.run_id)
        return {key: _known(first) for key, (first, *_) in found.items()}

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except MlflowException:  # another command has just made it, or it cannot be made
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
    def _asking(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException

        try:
            yield
        except (UnsupportedModelRegistryStoreURIException, ArgumentError) as error:
            told = shorten(without_secrets(str(error)), 300)
            raise InputError(
                f"{ADDRESS} must say where MLflow is, e.g. http://127.0.0.1:5000, but is {self._address}. "
                f"Correct it. ({told})"
            ) from error
        except (MlflowException, SQLAlchemyError, CommandError, OSError, ImportError) as error:
            told = shorten(without_secrets(str(error)), 300)
            raise TrackerError(f"MLflow at {self._address} {self._meaning(error)} ({told})") from error

    def _meaning(self, error: Exception) -> str:
        """What the error means and what to do."""
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
    """Return the HTTP status of an error of MLflow or, for artifacts, of `requests`."""
    if isinstance(error, ImportError):  # of a library for the store of the artifacts
        return 400
    if hasattr(error, "get_http_status_code"):
        return int(error.get_http_status_code())
    # A database that two commands make at once, or that is locked, is one that is away.
    return int(getattr(getattr(error, "response", None), "status_code", 500))


def _known(run: Any) -> _Known:
    metrics, tags = dict(run.data.metrics), run.data.tags
    steps = None if metrics else set[int]()
    facts = tags.keys() & fact_names(tags.get(FACTS))
    return _Known(run.info.run_id, tags.get(DIGEST, ""), metrics, set(run.data.params), facts, steps)


def _metrics(point: Point) -> list[Any]:
    at = (int(point.time * 1000), point.step)
    return [_metric(name, value, *at) for name, value in point.metrics.items()]


def _metric(name: str, value: float, milliseconds: int, step: int) -> Any:
    from mlflow.entities import Metric

    return Metric(name, value, milliseconds, step)
