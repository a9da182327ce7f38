from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, distribution_to_json
from support.command_line import Finished, hpo_command, ok, refused
from support.tiny import write_study
from support.whole_study import contents

from hpo.study.store import optuna_internals
from hpo.study.store.storage import open_storage
from hpo.trial.measure import Side

OVERFLOWING = {
    "name": "tiny",
    "n_trials": 1,
    "training": {"max_steps": 30, "batch_size": 8, "max_length": 64, "dropout": 0.0, "fp_precision": "fp16"},
    "amp": {"allow_emulated": True, "init_scale": 1e36, "min_scale": 1e36},
    "compat": {"enabled": False},
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study whose only trial is nonfinite. A test must not change it."""
    folder = tmp_path_factory.mktemp("broken")
    write_study(folder, **OVERFLOWING)
    assert hpo_command(folder, "run", "tiny.yaml").exit_code == 1, "no trial is complete"
    return folder


def diagnose(folder: Path, *options: str) -> Finished:
    return hpo_command(folder, "diagnose", "tiny.yaml", "--trial", "0", *options, width=200)


def state_of(folder: Path) -> tuple[Any, dict[str, bytes]]:
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage:
        database = contents(storage)
    files = (path for path in (folder / "runs" / "tiny").rglob("*") if path.is_file())
    return database, {str(path): path.read_bytes() for path in files}


def test_the_operator_and_the_remedies_are_shown(broken: Path, tmp_path: Path) -> None:
    before = state_of(broken)
    found = ok(diagnose(broken, "--json")).json
    assert state_of(broken) == before, "the study has not changed"
    assert (found["study"], found["trial"], found["outcome"]) == ("tiny", 0, "nonfinite")
    assert (found["precision"], found["step"], found["has_checkpoint"]) == ("fp16", 1, False)
    assert found["broken"]["what"] == "gradients"
    assert [one["heals"] for one in found["remedies"]] == [True] * 3
    folder = Path(shutil.copytree(broken, tmp_path / "copy"))
    (folder / "tiny.yaml").unlink()  # then the study comes from the database
    shown = ok(hpo_command(folder, "diagnose", "tiny", "--trial", "0", width=200)).out.splitlines()
    scale = found["remedies"][0]["settings"]["init_scale"]
    assert shown == [
        "Trial 0 (nonfinite, fp16), step 1: gradients not finite",
        "Run with the initial weights (it has no checkpoint).",
        f"First: {found['broken']['operator']}",
        f"With init_scale: {scale}, amp.min_scale: 1.0: finite",
        "With fp_precision: bf16: finite",
        "With fp_precision: fp32: finite",
    ]


@pytest.mark.parametrize(
    ("settings", "exit_code", "first", "last"),
    [
        (
            {"learning_rate": 10.0, "optimizer": "sgd", "max_grad_norm": None},
            1,
            "this batch is finite, run eagerly on one rank",
            "The trial broke later, in an evaluation, or only when compiled or on several ranks.",
        ),
        (
            {"loss_weight.criteria": 1e39},
            0,
            "loss not finite",
            "The precision is not the cause. Lower `learning_rate` or `max_grad_norm`.",
        ),
    ],
)
def test_a_trial_in_fp32_has_no_remedy(
    tmp_path: Path, settings: dict[str, Any], exit_code: int, first: str, last: str
) -> None:
    training = OVERFLOWING["training"] | settings | {"fp_precision": "fp32"}
    write_study(tmp_path, **OVERFLOWING | {"training": training, "search_space": {}})
    hpo_command(tmp_path, "run", "tiny.yaml")
    finished = diagnose(tmp_path)
    lines = finished.out.splitlines()
    assert (finished.exit_code, lines[0], lines[-1]) == (
        exit_code,
        f"Trial 0 (nonfinite, fp32), step 1: {first}",
        last,
    )


def test_the_cause_is_open_if_no_remedy_fits_into_memory(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Side.run

    def run_the_trial_only(side: Side) -> Any:
        amp = side.mixed_precision
        if amp.precision.name != "fp16" or amp.config.min_scale < 1e36:
            raise MemoryError
        return run(side)

    monkeypatch.setattr(Side, "run", run_the_trial_only)
    finished = diagnose(broken)
    lines = finished.out.splitlines()
    assert finished.exit_code == 0
    assert lines[0] == "Trial 0 (nonfinite, fp16), step 1: gradients not finite"
    assert [line.rpartition(": ")[2] for line in lines[3:6]] == ["out of memory"] * 3
    assert lines[6:] == [
        "It is not known whether the precision is the cause: the batch did not run in pure fp32."
    ]


def test_an_unknown_trial_is_refused(broken: Path) -> None:
    finished = hpo_command(broken, "diagnose", "tiny.yaml", "--trial", "7", width=200)
    refused(finished, "Trial 7: tiny has 1, numbered from 0.")


def test_a_trial_with_unknown_parameters_is_refused(broken: Path, tmp_path: Path) -> None:
    """Whoever can write to the database would choose which folder of this machine is read as a model."""
    folder = Path(shutil.copytree(broken, tmp_path / "copy"))
    other = distribution_to_json(CategoricalDistribution([str(tmp_path)]))
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        row = {"trial_id": 1, "param_name": "encoder", "param_value": 0.0, "distribution_json": other}
        connection.execute(sa.insert(optuna_internals.params).values(row))
    error = refused(diagnose(folder)).err
    assert ": The study does not search `encoder`." in " ".join(error.split())
