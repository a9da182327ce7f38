import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.command_line import finish, hpo_command, start_hpo, wait_until
from support.mlflow_server import MlflowServer, all_runs, client, experiment_of, runs
from support.tracked_study import TrackedStudy
from support.worker_process import killer, start_process

from hpo.study.store import optuna_internals, schema


def test_each_trial_is_one_run(mlflow_server: MlflowServer, tracked: TrackedStudy) -> None:
    tracked.run("complete", "pruned", "nonfinite", "incompatible", "failed", "complete")
    tracked.leave_running(alive=True)
    tracked.leave_running()
    tracked.study.enqueue_trial({"learning_rate": 1e-4})
    answer = tracked.tracked("mlflow")
    page = f"{mlflow_server.url}/#/experiments/{experiment_of(tracked.name)}/runs"
    assert answer["where"].startswith(page)
    assert (answer["trials"], answer["changed"]) == (8, 8)

    found = runs(tracked.name)
    assert {name: run["status"] for name, run in found.items()} == {
        "trial 0": "FINISHED",
        "trial 1": "KILLED",
        "trial 2": "FAILED",
        "trial 3": "FAILED",
        "trial 4": "FAILED",  # which trial 5 tries again
        "trial 5": "FINISHED",
        "trial 6": "RUNNING",
        "trial 7": "SCHEDULED",
    }
    run, trial = found["trial 0"], tracked.record.trials[0]
    assert run["params"].items() >= {name: str(value) for name, value in trial.params.items()}.items()
    start = int(trial.started.timestamp() * 1000)
    assert run["times"] == (start, int(trial.ended.timestamp() * 1000))
    assert [(step, at - start) for step, _, at in run["points"]["epoch"]] == [
        (step, pytest.approx(100 * step, abs=2)) for step in (10, 20, 30)
    ]
    assert [value for _, value, _ in run["points"]["criteria/f1_macro"]] == [0.1, 0.2, 0.3]
    assert run["points"]["trial/score"][0][:2] == (30, 0.5)
    assert run["tags"]["precision_effective"] == "fp32"
    assert found["trial 2"]["tags"]["outcome_reason"] == "it was nonfinite"
    assert [step for step, _, _ in found["trial 7"]["points"]["score"]] == [10]


@pytest.mark.usefixtures("mlflow_server")
def test_repeated_call_adds_changes_alone(tracked: TrackedStudy) -> None:
    tracked.change(tags={"team": "search", "outcome": "not this"})
    tracked.run("complete", "pruned")
    tracked.leave_running()
    assert tracked.tracked("mlflow")["changed"] == 3
    before = runs(tracked.name)
    tags = before["trial 0"]["tags"]
    assert (tags["team"], tags["outcome"]) == ("search", "complete")
    assert tracked.tracked("mlflow")["changed"] == 0
    assert runs(tracked.name) == before
    tracked.run("complete")  # continues the trial of the dead worker
    assert tracked.tracked("mlflow")["changed"] == 1
    after = runs(tracked.name)
    assert {**after, "trial 2": None} == {**before, "trial 2": None}
    assert after["trial 2"]["id"] == before["trial 2"]["id"]
    assert after["trial 2"]["status"] == "FINISHED"
    assert [step for step, _, _ in after["trial 2"]["points"]["score"]] == [10, 20, 30]

    client().set_tag(after["trial 0"]["id"], "mine", "kept")
    tracked.change(tags={"ticket": "7"}, n_trials=4, stall_seconds=60.0)
    assert tracked.tracked("mlflow")["changed"] == 3
    tags = runs(tracked.name)["trial 0"]["tags"]
    assert (tags["mine"], tags["ticket"]) == ("kept", "7")


def test_follow_survives_outage_of_server(mlflow_server: MlflowServer, tracked: TrackedStudy) -> None:
    tracked.change(n_trials=3)
    tracked.run("complete")
    process = start_hpo(tracked.folder, "track", tracked.name, "--to", "mlflow", "--follow")
    wait_until(lambda: client().get_experiment_by_name(tracked.name) is not None, process)
    wait_until(  # until the last request for the first trial
        lambda: any("mlflow.parentRunId" in run["tags"] for run in all_runs(tracked.name).values()), process
    )
    mlflow_server.stop()
    tracked.run("nonfinite")
    line = process.stderr.readline()
    assert f"MLflow at {mlflow_server.url} did not answer" in line
    assert "It is tried again" in line
    once = tracked.track("mlflow")
    assert once.exit_code == 1
    assert once.err.count("Error:") == 1
    tracked.run("complete")
    mlflow_server.start()
    finished = finish(process)
    assert finished.exit_code == 0, "the study has ended"
    assert finished.err == "The tracker is back.\n"
    statuses = {name: run["status"] for name, run in runs(tracked.name).items()}
    assert statuses == {"trial 0": "FINISHED", "trial 1": "FAILED", "trial 2": "FINISHED"}


def _die_after(folder: Path, study: str, calls: int) -> None:
    from mlflow import MlflowClient

    die = killer(calls)
    for name in ("create_run", "log_batch", "set_terminated", "set_tag"):
        method = getattr(MlflowClient, name)

        def call(*args: Any, method: Any = method, **options: Any) -> Any:
            returned = method(*args, **options)
            die()
            return returned

        setattr(MlflowClient, name, call)
    hpo_command(folder, "track", study, "--to", "mlflow")


@pytest.mark.usefixtures("mlflow_server")
def test_call_after_kill_repeats_no_content(tracked: TrackedStudy) -> None:
    tracked.run("complete", "complete")
    for calls in (1, 3, 6, 14, 40):  # each process continues after the kill of the previous one
        process = start_process(_die_after, tracked.folder, tracked.name, calls)
        process.join(60)
        assert process.exitcode in (-signal.SIGKILL, 0)
    assert process.exitcode == 0, "too many kills: the last process had nothing to do"
    tracked.tracked("mlflow")
    found = runs(tracked.name)
    assert len(found) == 2
    for run in found.values():
        assert [step for step, _, _ in run["points"]["score"]] == [10, 20, 30]
        assert run["status"] == "FINISHED"


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egnp.exe \ud800 ' OR 1=1 -- <img src=x onerror=alert(1)>"


@pytest.mark.usefixtures("mlflow_server")
def test_hostile_names_are_replaced(tracked: TrackedStudy) -> None:
    tracked.run("complete", reason=HOSTILE)
    names = [HOSTILE, "..", "a/../b", "//x//", ".", "", "a" * 400, "x\n", "x\t", "é☃"]
    metrics = {name: {"f1": 0.5} for name in names} | {"score": 0.5, "epoch": float("nan"), "big": 1e308}
    params, evaluations = optuna_internals.params, schema.evaluations
    with tracked.storage.engine.begin() as connection:
        connection.execute(sa.update(evaluations).values(metrics=json.dumps(metrics)))
        first = connection.execute(sa.select(params).limit(1)).one()
        evil = sa.update(params).where(params.c.param_id == first.param_id)
        connection.execute(evil.values(param_name="..\x1b[2J"))
    for _ in range(2):  # half of a surrogate pair breaks the report alone
        finished = tracked.track("mlflow")
        assert finished.exit_code == 1
        assert "All trials are shown, but the report could not be written: UnicodeEncodeError" in finished.err
        assert finished.err.count("\n") == 1
    (run,) = runs(tracked.name).values()
    of_names = [name for name in run["points"] if re.search(r"f1(_\d)?$", name)]
    assert len(of_names) == len(names) - 1, "unique names, except the longest one"
    assert "a" * 200 in run["points"]
    shown = repr(run)
    for unsafe in ("\\x1b", "\\x07", "\\u202e", "\\ud800"):
        assert unsafe not in shown
    assert "OR 1=1" in run["tags"]["outcome_reason"]


@pytest.mark.parametrize(
    ("address", "exit_code", "message"),
    [
        ("", 2, "MLFLOW_TRACKING_URI must say where MLflow is"),
        ("http://user:secret@127.0.0.1:9", 1, "user:***@127.0.0.1:9"),
        ("sqlite:////no/such/folder/x.db", 2, "the folder `/no/such/folder` must exist"),
        (f"foo://u:{'secret' * 99}@x", 2, "MLFLOW_TRACKING_URI must say where MLflow is"),
    ],
    ids=["none", "unreachable", "no folder", "long password"],
)
def test_bad_address_is_one_error(
    tracked: TrackedStudy, monkeypatch: pytest.MonkeyPatch, address: str, exit_code: int, message: str
) -> None:
    tracked.run("complete")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    finished = tracked.track("mlflow")
    assert finished.exit_code == exit_code
    assert finished.err.count("Error: ") == 1
    assert message in finished.err
    assert "Traceback" not in finished.err
    assert "secret" not in finished.err + finished.out


@pytest.mark.usefixtures("mlflow_server")
def test_run_of_study_has_report(tracked: TrackedStudy) -> None:
    tracked.run("complete", "pruned")
    tracked.tracked("mlflow")
    study = all_runs(tracked.name)[f"study {tracked.name}"]
    assert study["status"] == "SCHEDULED"
    assert study["params"]["max_length"] == "256"
    assert json.loads(study["params"]["search_space.batch_size"])["choices"] == [8, 16, 32]
    assert "batch_size" not in study["params"]
    assert study["tags"].items() >= {"n_trials": "9", "trials_done": "2", "best_trial": "0"}.items()
    assert study["points"]["best/score"][0][:2] == (2, 0.5)

    folder = Path(client().download_artifacts(study["id"], "", str(tracked.folder)))
    definition = json.loads((folder / "study.json").read_text())
    assert definition == tracked.record.definition
    assert tracked.name in (folder / "report/report.html").read_text()
    assert len((folder / "report/tables/trials.csv").read_text().splitlines()) == 3

    tracked.change(n_trials=3)
    tracked.run("complete")
    tracked.tracked("mlflow")
    study = all_runs(tracked.name)[f"study {tracked.name}"]
    assert (study["status"], study["tags"]["n_trials"]) == ("FINISHED", "3")
    folder = Path(client().download_artifacts(study["id"], "", str(tracked.folder)))
    assert len((folder / "report/tables/trials.csv").read_text().splitlines()) == 4
