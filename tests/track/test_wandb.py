import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import finish, start_hpo
from support.tracked_study import TrackedStudy


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def records(path: Path) -> Iterator[Any]:
    """Read a `.wandb` file: protobufs in a LevelDB log (blocks of 32 KiB, chunks with 7 bytes of header)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def run_of(folder: Path, number: int | str) -> dict[str, Any]:
    (path,) = folder.glob(f"wandb/offline-run-*-{number}/*.wandb")
    found: dict[str, Any] = {"history": [], "config": {}, "summary": {}, "exit": None, "files": set()}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
        if kind == "history":
            items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            found["history"].append({"step": record.history.step.num, **items})
        for part in ("config", "summary"):
            for item in getattr(record, part).update if kind == part else ():
                found[part][item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            manifest = record.request.log_artifact.artifact.manifest
            found["files"] = {entry.path for entry in manifest.contents}
        if kind == "artifact":
            found["files"] = {entry.path for entry in record.artifact.manifest.contents}
        if kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def test_each_trial_is_one_run(tracked: TrackedStudy) -> None:
    tracked.run("complete", "nonfinite", "pruned")
    tracked.leave_running()
    assert tracked.tracked("wandb")["changed"] == 4
    folder = tracked.folder / "runs" / tracked.name
    token = tracked.storage.study_token(tracked.name)
    found = [run_of(folder, number) for number in range(4)]
    assert [run["id"] for run in found] == [f"{token}-{number}" for number in range(4)]
    assert {run["project"] for run in found} == {tracked.name}
    assert [run["exit"] for run in found] == [0, 1, 0, 1], "1: failed or unfinished"
    history, trial = found[0]["history"], tracked.record.trials[0]
    assert [row["step"] for row in history if "score" in row] == [10, 20, 30]
    assert [row["criteria/f1_macro"] for row in history] == [0.1, 0.2, 0.3]
    assert history[0]["_timestamp"] == pytest.approx(trial.started.timestamp() + 1, abs=0.01)
    assert found[0]["summary"]["trial/score"] == 0.5
    assert found[0]["config"].items() >= {**trial.params, "outcome": "complete"}.items()
    whole = run_of(folder, "study")
    assert (whole["id"], whole["config"]["n_trials"]) == (f"{token}-study", "9")
    assert whole["files"] >= {"study.json", "report/report.html", "report/tables/trials.csv"}

    before = sorted(path.name for path in folder.glob("wandb/offline-run-*"))
    assert tracked.tracked("wandb")["changed"] == 0
    assert sorted(path.name for path in folder.glob("wandb/offline-run-*")) == before
    tracked.run("complete")
    assert tracked.tracked("wandb")["changed"] == 1
    assert [row["step"] for row in run_of(folder, 3)["history"]] == [10, 20, 30]
    assert run_of(folder, 3)["exit"] == 0


def test_error_without_account_names_remedy(tracked: TrackedStudy) -> None:
    tracked.run("complete")
    environment = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": ""}
    environment["NETRC"] = str(tracked.folder / "none")
    finished = finish(start_hpo(tracked.folder, "track", tracked.name, "--to", "wandb", **environment))
    assert finished.exit_code == 1
    assert "W&B does not take the runs. Log in (`wandb login`), or set WANDB_MODE=offline" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("to", ["wandb", "mlflow", "tensorboard"])
def test_missing_package_is_one_error(
    tracked: TrackedStudy, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    imported = [name for name in sys.modules if name.split(".")[0] == to]
    for name in [*imported, "torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, to, None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    finished = tracked.track(to)
    assert finished.exit_code == 2
    assert f"run `make install EXTRAS={to}`" in finished.err
