"""`hpo diagnose` and `hpo verify --parts` as a user runs them."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import Finished, finish, hpo_command, ok, start_hpo, stored
from tiny import ENCODER, write_study
from whole_study import contents

from hpo.cli.diagnosing import print_diagnosis
from hpo.study.storage import open_storage
from hpo.trial.diagnosis import Diagnosis

TRAINING = {"max_steps": 30, "batch_size": 8, "max_length": 64, "dropout": 0.0}
DIVERGING = {
    "name": "tiny",
    "n_trials": 1,
    "training": TRAINING | {"optimizer": "sgd", "max_grad_norm": None, "fp_precision": "fp32"},
    "search_space": {"learning_rate": {"type": "categorical", "choices": [10.0]}},
}
# Weights so large that the layers pass fp16's largest number; LayerNorm hides it from fp32.
OVERFLOWING = {
    "n_trials": 1,
    "model": {"encoder": ENCODER | {"initializer_range": 300.0}},
    "search_space": {"fp_precision": {"type": "categorical", "choices": ["fp16"]}},
}


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study whose only trial has diverged; not to be changed."""
    folder = tmp_path_factory.mktemp("diverged")
    write_study(folder, **DIVERGING)
    assert hpo_command(folder, "run", "tiny.yaml").exit_code == 1, "no trial is complete"
    return folder


def diagnose(folder: Path, *options: str) -> Finished:
    return hpo_command(folder, "diagnose", "tiny.yaml", "--trial", "0", *options, width=200)


def state_of(folder: Path) -> tuple[Any, dict[str, bytes]]:
    """All that the database has of the study, and its files."""
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage:
        database = contents(storage)
    files = (path for path in (folder / "runs" / "tiny").rglob("*") if path.is_file())
    return database, {str(path): path.read_bytes() for path in files}


def test_a_trial_that_diverged(diverged: Path) -> None:
    before = state_of(diverged)
    finished = ok(diagnose(diverged, "--json"))
    found = finished.json
    assert (found["study"], found["trial"], found["outcome"]) == ("tiny", 0, "nonfinite")
    assert (found["what"], found["started_at"]) == ("loss", 0)
    assert stored(diverged).trials[0].telemetry["num_steps"] >= found["step"] > 1
    assert found["origin"]["phase"] == "forward"
    assert found["origin"]["module"].startswith("encoder.")
    assert found["healed_by"] == {"max_grad_norm": 1.0}
    assert "running trial 0 again from its first step" in finished.err
    assert "trying max_grad_norm: 1" in finished.err
    text = ok(diagnose(diverged)).out
    assert re.search(rf"Trial 0 \(nonfinite, fp32\): loss not finite at step {found['step']}", text)
    assert f"Module    {found['origin']['module']}" in text
    assert re.search(r"max_grad_norm: 1 +yes +finite from step", text)
    assert "Use max_grad_norm: 1." in text
    assert state_of(diverged) == before, "nothing of the study has changed"


def test_it_goes_on_from_a_checkpoint_that_the_worker_left(tmp_path: Path) -> None:
    write_study(tmp_path, **DIVERGING, evaluation={"per_trial": 15})  # each may write one
    assert hpo_command(tmp_path, "run", "tiny.yaml").exit_code == 1
    found = ok(diagnose(tmp_path, "--json")).json
    assert (found["what"], found["origin"]["phase"]) == ("loss", "forward")
    assert 0 < found["started_at"] < found["step"]


def test_a_trial_that_the_check_refused(tmp_path: Path) -> None:
    write_study(tmp_path, **OVERFLOWING)
    assert hpo_command(tmp_path, "run", "tiny.yaml").exit_code == 1
    found = ok(diagnose(tmp_path, "--json")).json
    assert (found["outcome"], found["what"], found["step"]) == ("incompatible", "logits", None)
    assert found["origin"]["module"] == "encoder.encoder.layer.0.attention.output.dense"
    assert {f"precision_overrides.encoder.layer.{layer}" for layer in (0, 1)} <= found["healed_by"].keys()
    # The settings that it names heal the study.
    training = {"max_steps": 4, "batch_size": 8, "max_length": 64, "dropout": 0.0}
    write_study(tmp_path, **OVERFLOWING | {"name": "healed", "training": training | found["healed_by"]})
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))


def test_the_parts_that_make_a_precision_ok(tmp_path: Path) -> None:
    write_study(tmp_path, **OVERFLOWING)
    verify = ("verify", "tiny.yaml", "--repeats", "1")
    rows = {row["name"]: row for row in ok(hpo_command(tmp_path, *verify, "--json")).json["precisions"]}
    assert rows["fp16"]["float32_parts"] is None
    assert "precision_overrides" not in rows["fp16"]["note"]
    told = ok(hpo_command(tmp_path, *verify, "--parts", "--json"))
    rows = {row["name"]: row for row in told.json["precisions"]}
    parts = rows["fp16"]["float32_parts"]
    assert {"encoder.layer.0", "encoder.layer.1"} <= set(parts)
    assert rows["fp32"]["float32_parts"] is None
    lines = "".join(f"\n  precision_overrides.{part}: fp32" for part in parts)
    assert f"with these lines under `training:`{lines}" in rows["fp16"]["note"]
    assert rows["fp16"]["with_parts"]["verdict"] == "ok"
    assert "checking fp16 with embeddings, encoder.layer.0" in told.err


def test_a_good_trial_shows_its_modules(ran: Path) -> None:
    best = str(ok(hpo_command(ran, "best", "tiny.yaml", "--json")).json["trials"][0]["number"])
    text = ok(hpo_command(ran, "diagnose", "tiny.yaml", "--trial", best, width=200)).out
    assert re.search(rf"Trial {best} \(complete, fp32\): nothing broke", text)
    assert re.search(r"module +class +own error +error here", text)


def test_the_checkpoint_of_a_good_trial_is_gone(ran: Path) -> None:
    best = ok(hpo_command(ran, "best", "tiny.yaml", "--json")).json["trials"][0]["number"]
    finished = hpo_command(ran, "diagnose", "tiny.yaml", "--trial", str(1 - best))
    assert (finished.exit_code, finished.out) == (1, "")
    assert "checkpoint.top_k says how many trials keep theirs" in " ".join(finished.err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--trial", "7"), "--trial 7: there is no such trial of tiny; it has 1, numbered from 0."),
        (("--trial", "-1"), "'--trial': Input should be greater than or equal to 0"),
        (("--trial", "zero"), "'--trial': Input should be a valid integer"),
        ((), "Missing option '--trial'"),
        (("--trial", "0", "--max-steps", "2"), "but --max-steps allows 2. Raise it."),
        (("--trial", "0", "--max-steps", "0"), "'--max-steps': Input should be greater than or equal to 1"),
    ],
)
def test_nonsense(diverged: Path, options: tuple[str, ...], message: str) -> None:
    finished = hpo_command(diverged, "diagnose", "tiny.yaml", *options, width=200)
    assert (finished.exit_code, finished.out) == (2, "")
    assert message in " ".join(finished.err.split())


def test_data_that_have_changed(diverged: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(diverged, tmp_path / "copy"))
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE hpo_studies SET data = 'other'")
    finished = diagnose(folder)
    assert finished.exit_code == 2
    assert "The data of the study `tiny` have changed since it was made" in " ".join(finished.err.split())


def test_it_takes_the_study_from_the_database_where_its_file_is_gone(diverged: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(diverged, tmp_path / "copy"))
    (folder / "tiny.yaml").unlink()
    found = ok(hpo_command(folder, "diagnose", "tiny", "--trial", "0", "--json")).json
    assert found["healed_by"] == {"max_grad_norm": 1.0}


def test_killed_in_the_middle_it_leaves_the_study_as_it_was(diverged: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(diverged, tmp_path / "copy"))
    before = state_of(folder)
    process = start_hpo(folder, "diagnose", "tiny.yaml", "--trial", "0")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("trying"):
            break
    os.killpg(process.pid, signal.SIGKILL)
    assert finish(process).exit_code == -signal.SIGKILL
    assert state_of(folder) == before
    assert ok(diagnose(folder, "--json")).json["healed_by"] == {"max_grad_norm": 1.0}


@pytest.mark.parametrize("what", ["raised", "far"])
def test_the_parts_are_shown_where_no_operator_is_known(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Diagnosis(3, "incompatible", "bf16", what=what, parts=("encoder.layer.1.attention", "attention"))
    print_diagnosis(found)
    out = capsys.readouterr().out
    assert "Parts     encoder.layer.1.attention, attention" in out
    assert "Operator" not in out
