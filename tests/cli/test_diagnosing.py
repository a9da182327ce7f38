import shutil
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, distribution_to_json
from support.command_line import hpo_command, ok, refused
from support.tiny import write_study
from support.whole_study import contents

from hpo.study.store import optuna_internals
from hpo.study.store.storage import open_storage

OVERFLOWING = {
    "name": "tiny",
    "n_trials": 1,
    "training": {"max_steps": 30, "batch_size": 8, "max_length": 64, "dropout": 0.0, "fp_precision": "fp16"},
    "amp": {"allow_emulated": True, "init_scale": 1e36, "min_scale": 1e36},
    "compat": {"enabled": False},
}
DIAGNOSE = ("diagnose", "tiny.yaml", "--trial", "0")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study whose only trial is nonfinite. A test must not change it."""
    folder = tmp_path_factory.mktemp("broken")
    write_study(folder, **OVERFLOWING)
    assert hpo_command(folder, "run", "tiny.yaml").exit_code == 1, "no trial is complete"
    return folder


def state_of(folder: Path) -> tuple[Any, dict[str, bytes]]:
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage:
        database = contents(storage)
    files = (path for path in (folder / "runs" / "tiny").rglob("*") if path.is_file())
    return database, {str(path): path.read_bytes() for path in files}


def test_diagnose_shows_the_operator_and_the_remedies(broken: Path) -> None:
    before = state_of(broken)
    result = ok(hpo_command(broken, *DIAGNOSE, "--json")).json
    assert state_of(broken) == before, "the study has not changed"
    assert (result["study"], result["trial"], result["outcome"]) == ("tiny", 0, "nonfinite")
    assert [one["heals"] for one in result["remedies"]] == [True] * 3
    scale = result["remedies"][0]["settings"]["init_scale"]
    assert ok(hpo_command(broken, *DIAGNOSE, width=200)).out.splitlines() == [
        "Trial 0 (nonfinite, fp16), step 1: gradients not finite",
        "Run with the initial weights (it has no checkpoint).",
        f"First: {result['broken']['operator']}",
        f"With init_scale: {scale}, amp.min_scale: 1.0: finite",
        "With fp_precision: bf16: finite",
        "With fp_precision: fp32: finite",
    ]


def test_parameters_outside_the_study_are_refused(broken: Path, tmp_path: Path) -> None:
    """Otherwise a stranger with access to the database could choose a folder to load as a model."""
    folder = Path(shutil.copytree(broken, tmp_path / "copy"))
    other = distribution_to_json(CategoricalDistribution([str(tmp_path)]))
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        row = {"trial_id": 1, "param_name": "encoder", "param_value": 0.0, "distribution_json": other}
        connection.execute(sa.insert(optuna_internals.params).values(row))
    refused(hpo_command(folder, *DIAGNOSE, width=200), ": The study does not search `encoder`.")
