"""The first rung of a study suits its data: training to there takes at least as long as the evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from command_line import hpo_command, ok
from tiny import CPU, tiny_executor, write_study

from hpo.study.reading.reader import read_study
from hpo.study.store.storage import open_storage
from hpo.trial.trial_parts import fit_rungs

EPOCHS = {"epochs": 2, "batch_size": 8, "max_length": 64, "dropout": 0.0}
STUDY: dict[str, Any] = {"n_trials": 4, "training": EPOCHS, "pruner": {"name": "promote", "keep": 1}}
"""Of 48 rows to train on and 24 to evaluate: an evaluation is 24 / (3 * 96) of a trial, 1/12."""


def test_trials_pause_where_the_evaluation_is_paid_for(tmp_path: Path) -> None:
    """The plan says so, a file that gives no first rung keeps the stored one, and another has its own."""
    database = f"sqlite:///{tmp_path}/hpo.db"
    write_study(tmp_path, **STUDY)
    planned = ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--json")).json
    assert [stage["end"] for stage in planned["stages"]] == [0.09, 0.27, 1.0]
    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--storage", database))
    for changes, rungs in (
        ({"n_trials": 5}, {0.09, 0.27}),
        ({"n_trials": 6, "pruner": {"name": "promote", "keep": 1, "starts": 0.3}}, {0.09, 0.27, 0.3}),
    ):
        write_study(tmp_path, **STUDY | changes)
        ok(hpo_command(tmp_path, "run", "tiny.yaml", "--storage", database))
        with open_storage(database) as storage:
            trials = read_study(storage, "tiny").trials
        assert {trial.attributes.get("paused_at") for trial in trials} - {None} == rungs


def test_a_study_of_before_keeps_its_rungs(tmp_path: Path) -> None:
    """Its paused trials are at rungs that another first one would not have."""
    database = f"sqlite:///{tmp_path}/hpo.db"
    write_study(tmp_path, **STUDY)
    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--storage", database, "--timeout", "0.001"))
    with open_storage(database) as storage, storage.engine.begin() as connection:
        row = sa.text("SELECT definition FROM hpo_studies")
        definition = json.loads(connection.execute(row).scalar_one())
        definition["pruner"]["starts"] = None
        definition["given"].remove("pruner")
        change = sa.text("UPDATE hpo_studies SET definition = :definition")
        connection.execute(change, {"definition": json.dumps(definition)})
    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--storage", database))
    with open_storage(database) as storage:
        trials = read_study(storage, "tiny").trials
    paused_at = {trial.attributes.get("paused_at") for trial in trials}
    assert paused_at - {None} == {0.12, 0.36}, "four trials of nine would go on from 0.04: none pauses there"


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({"training": EPOCHS | {"epochs": 20}}, None),  # an evaluation is 1/120
        ({"training": EPOCHS | {"epochs": 0.1}}, 0.5),  # it takes longer than the training
        ({"training": {"max_steps": 4, "batch_size": 8}}, None),  # whose rows depend on the batch
        ({"training": {"batch_size": 8}}, 0.06),  # 3 epochs
    ],
)
def test_the_first_rung(tmp_path: Path, changes: dict[str, Any], starts: float | None) -> None:
    executor = tiny_executor(tmp_path, CPU, **STUDY | changes)
    assert fit_rungs(executor.study, executor.dataset).pruner.starts == starts
