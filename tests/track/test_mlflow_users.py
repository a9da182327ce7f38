"""A full MLflow server with users and passwords: a study is shown, or the one error says what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow_server import ADMIN, FULL_PYTHON, MlflowServer
from support.command_line import finish, hpo_command, ok, start_hpo, stored, wait_until
from support.tiny import write_study
from test_mlflow import all_runs, client, experiment_of, runs
from tracked_study import TrackedStudy

pytestmark = pytest.mark.skipif(
    FULL_PYTHON not in os.environ, reason=f"{FULL_PYTHON} names no Python that has `mlflow[auth]`"
)
PASSWORDS = {"anna": "password-of-anna", "ben": "password-of-ben", ADMIN[0]: ADMIN[1]}


@pytest.fixture(scope="module")
def server_with_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("users"), with_users=True)
    server.start()
    for name in ("anna", "ben"):
        server.post("2.0/mlflow/users/create", username=name, password=PASSWORDS[name])
    yield server
    server.stop()


@pytest.fixture
def server(server_with_users: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    server_with_users.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server_with_users.url)
    log_in(monkeypatch, "anna")
    return server_with_users


def log_in(monkeypatch: pytest.MonkeyPatch, name: str, password: str | None = None) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", name)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password or PASSWORDS[name])


def refused(tracked: TrackedStudy) -> str:
    finished = tracked.track("mlflow")
    assert (finished.exit_code, finished.out) == (1, "")
    assert finished.err.startswith("Error: MLflow at ")
    assert finished.err.count("\n") == 1
    return finished.err


def test_a_wrong_password_and_then_the_right_one(
    server: MlflowServer, tracked: TrackedStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked.run("complete")
    log_in(monkeypatch, "anna", "wrong-password")
    error = refused(tracked)
    assert f"{server.url} must know this user. Set MLFLOW_TRACKING_USERNAME and" in error
    assert "wrong-password" not in error
    log_in(monkeypatch, "anna")
    assert tracked.tracked("mlflow")["changed"] == 1
    folder = Path(client().download_artifacts(all_runs(tracked.name)[f"study {tracked.name}"]["id"], ""))
    assert (folder / "report/report.html").exists()


def test_a_user_without_the_permission_and_then_with_it(
    server: MlflowServer, tracked: TrackedStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked.run("complete")
    tracked.tracked("mlflow")
    tracked.run("complete")
    log_in(monkeypatch, "ben")
    assert f"must let this user edit the experiment `{tracked.name}`" in refused(tracked)
    log_in(monkeypatch, "anna")
    experiment = experiment_of(tracked.name)
    given = {"resource_type": "experiment", "resource_id": experiment, "permission": "EDIT"}
    server.post("3.0/mlflow/users/permissions/grant", username="ben", **given)
    log_in(monkeypatch, "ben")
    assert tracked.tracked("mlflow")["changed"] == 1
    assert len(runs(tracked.name)) == 2


STUDY: dict[str, Any] = {"n_trials": 2, "tracker": "mlflow", "evaluation": {"per_trial": 4}}


def test_a_search_goes_on_with_a_wrong_password_and_a_later_call_shows_all(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "wrong password")
    log_in(monkeypatch, "anna", "wrong-password")
    write_study(tmp_path, **STUDY)
    finished = ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    assert finished.err.count(f"MLflow at {server.url} must know this user.") == 1
    assert [trial.outcome for trial in stored(tmp_path).trials] == ["complete", "complete"]
    log_in(monkeypatch, "anna")
    told = ok(hpo_command(tmp_path, "track", "tiny", "--to", "mlflow", "--json")).json
    assert (told["trials"], told["changed"]) == (2, 2)
    write_study(tmp_path, **STUDY | {"n_trials": 3})
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    assert sorted(runs("wrong password")) == ["trial 0", "trial 1", "trial 2"]


def test_a_server_that_is_away_for_a_while(server: MlflowServer, tracked: TrackedStudy) -> None:
    tracked.resize(2)
    tracked.run("complete")
    process = start_hpo(tracked.folder, "track", tracked.name, "--to", "mlflow", "--follow")
    wait_until(lambda: client().get_experiment_by_name(tracked.name) is not None, process)
    wait_until(lambda: bool(runs(tracked.name)), process)
    server.stop()
    tracked.run("complete")
    assert "did not answer" in process.stderr.readline()
    server.start()
    finished = finish(process)
    assert (finished.exit_code, finished.err) == (0, "The tracker is back.\n")
    assert len(runs(tracked.name)) == 2
    assert tracked.tracked("mlflow")["changed"] == 0
