"""`hpo diagnose` as a user runs it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from command_line import Finished, hpo_command, ok
from optuna.distributions import CategoricalDistribution, distribution_to_json
from tiny import write_study
from whole_study import contents

from hpo.study.store import optuna_internals
from hpo.study.store.storage import open_storage

TRAINING = {"max_steps": 30, "batch_size": 8, "max_length": 64, "dropout": 0.0}
DIVERGING = {
    "name": "tiny",
    "n_trials": 1,
    "training": TRAINING | {"optimizer": "sgd", "max_grad_norm": None, "fp_precision": "fp32"},
    "search_space": {"learning_rate": {"type": "categorical", "choices": [10.0]}},
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


def test_a_trial_that_diverged(diverged: Path, tmp_path: Path) -> None:
    before = state_of(diverged)
    finished = ok(diagnose(diverged, "--json"))
    found, broken = finished.json, finished.json["broken"]
    assert (found["study"], found["trial"], found["outcome"]) == ("tiny", 0, "nonfinite")
    assert broken["what"] == "loss"
    assert re.fullmatch(r"loss not finite at step \d+", broken["text"])
    assert " in encoder." in broken["operator"]
    assert found["healed_by"] == {"max_grad_norm": 1.0}
    assert re.search(r"running trial 0 again from step 1: at most \d+ steps, about \d+ s; then", finished.err)
    assert "trying max_grad_norm: 1" in finished.err
    assert state_of(diverged) == before, "nothing of the study has changed"
    folder = Path(shutil.copytree(diverged, tmp_path / "copy"))
    (folder / "tiny.yaml").unlink()  # then the study is taken from the database
    lines = ok(hpo_command(folder, "diagnose", "tiny", "--trial", "0", width=200)).out.splitlines()
    assert lines[0] == f"Trial 0 (nonfinite, fp32): {broken['text']}"
    assert lines[1] == f"First: {broken['operator']}"
    assert lines[-2:] == ["Tried: max_grad_norm: 1 (finite)", "Use max_grad_norm: 1."]


def test_a_trial_that_the_study_does_not_have(diverged: Path) -> None:
    finished = hpo_command(diverged, "diagnose", "tiny.yaml", "--trial", "7", width=200)
    assert (finished.exit_code, finished.out) == (2, "")
    assert "Trial 7: tiny has 1, numbered from 0." in finished.err


def test_a_trial_whose_parameters_the_study_does_not_search_is_refused(
    diverged: Path, tmp_path: Path
) -> None:
    """Whoever can write to the database would choose which folder of this machine is read as a model."""
    folder = Path(shutil.copytree(diverged, tmp_path / "copy"))
    other = distribution_to_json(CategoricalDistribution([str(tmp_path)]))
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        row = {"trial_id": 1, "param_name": "encoder", "param_value": 0.0, "distribution_json": other}
        connection.execute(sa.insert(optuna_internals.params).values(row))
    finished = diagnose(folder)
    assert finished.exit_code == 2
    assert ": it has `encoder`, which is not searched." in " ".join(finished.err.split())
