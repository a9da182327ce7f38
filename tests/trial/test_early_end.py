"""A trial that ends early is complete, with its best weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.command_line import hpo_command, ok, stored
from support.resumed_trials import check_resume_is_exact
from support.tiny import tiny_executor, write_study

from hpo.config.limits import ObjectiveConfig
from hpo.config.study_config import load_study
from hpo.errors import StudyFileError
from hpo.trial.callbacks import Callbacks
from hpo.trial.patience import evaluations_without_improvement
from hpo.trial.telemetry import ScoredEvaluation

STEPS = {"max_steps": 40, "batch_size": 8, "max_length": 64, "dropout": 0.0}
UNCHANGED = {"learning_rate": 1e-30}
"""A rate that leaves the weights, and so the score, as they are."""


@pytest.mark.parametrize(
    ("values", "direction", "min_delta", "expected"),
    [
        ([], "maximize", 0.0, 0),
        ([0.5, 0.6, 0.7], "maximize", 0.0, 0),
        ([0.5, 0.5, 0.5], "maximize", 0.0, 2),
        ([0.5, 0.7, 0.6, 0.65], "maximize", 0.0, 2),
        ([0.5, 0.55, 0.58], "maximize", 0.1, 2),
        ([0.5, 0.55, 0.61], "maximize", 0.1, 0),
        ([0.5, 0.4, 0.45, 0.39], "minimize", 0.0, 0),
        ([0.5, 0.4, 0.45, 0.39], "minimize", 0.05, 2),
        ([math.nan, math.nan], "maximize", 0.0, 0),
        ([math.nan, 0.5, math.nan], "maximize", 0.0, 1),
    ],
)
def test_evaluations_since_the_last_improvement_are_counted(
    values: list[float], direction: Any, min_delta: float, expected: int
) -> None:
    objective = ObjectiveConfig(direction=direction)
    assert evaluations_without_improvement(values, objective, min_delta) == expected


def test_a_trial_without_improvement_ends_complete(tmp_path: Path) -> None:
    made: list[ScoredEvaluation] = []
    study = {"training": STEPS, "evaluation": {"per_trial": 8, "patience": 2}}
    result = tiny_executor(tmp_path, **study).run(UNCHANGED, tmp_path / "trial", "", Callbacks(made.append))
    assert (str(result.outcome), len(made)) == ("complete", 3)
    assert result.values == made[0].values
    assert result.telemetry["num_steps"] == 15
    assert result.telemetry["stopped_early"] == result.reason
    assert result.reason == (
        "Training ended early at step 15, at 38% of its budget: "
        "score has not improved in 2 evaluations (evaluation.patience)."
    )
    assert [*(tmp_path / "trial").glob("best-*")]


def test_a_trial_without_patience_trains_to_its_end(tmp_path: Path) -> None:
    result = tiny_executor(tmp_path, training=STEPS, evaluation={"per_trial": 8}).run(UNCHANGED, None, "")
    assert (result.telemetry["num_steps"], result.reason) == (40, "")
    assert "stopped_early" not in result.telemetry


def test_patience_that_runs_out_with_the_budget_is_no_early_end(tmp_path: Path) -> None:
    study = {"training": STEPS, "evaluation": {"per_trial": 3, "patience": 2}}
    result = tiny_executor(tmp_path, **study).run(UNCHANGED, None, "")
    assert (result.telemetry["num_steps"], result.reason) == (40, "")


def test_a_resumed_trial_counts_the_evaluations_before_it(tmp_path: Path) -> None:
    study = {"training": STEPS, "evaluation": {"per_trial": 8, "patience": 3}}
    result = check_resume_is_exact(tiny_executor(tmp_path, **study), tmp_path, 13, **UNCHANGED)
    assert result.telemetry["resumed_from_step"] == 11
    assert result.telemetry["num_steps"] == 20


@pytest.mark.parametrize(
    "pruner",
    [
        {"name": "promote", "starts": 0.4, "keep": 1},
        {"name": "optuna.pruners.ThresholdPruner", "upper": -1.0, "n_warmup_steps": 4},
    ],
    ids=lambda pruner: str(pruner["name"]),
)
def test_a_trial_that_ends_early_is_neither_pruned_nor_paused(tmp_path: Path, pruner: dict[str, Any]) -> None:
    """Its last evaluation, the fourth, is at a rung of `promote`, and is the first that the other stops."""
    write_study(
        tmp_path,
        training=STEPS | {"learning_rate": 1e-30},
        search_space={"weight_decay": {"type": "float", "low": 0.0, "high": 0.1}},
        evaluation={"per_trial": 10, "patience": 3},
        pruner=pruner,
        n_trials=3,
    )
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    trials = stored(tmp_path).trials
    assert [(trial.outcome, len(trial.evaluations)) for trial in trials] == [("complete", 4)] * 3
    assert all(trial.values and "stopped_early" in trial.telemetry for trial in trials)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {"patience": 0}}, r"evaluation\.patience: must be >= 1, but got `0`"),
        ({"evaluation": {"min_delta": 0.1}}, r"evaluation\.min_delta: .*needs `patience`"),
        ({"evaluation": {"patience": 2, "min_delta": -1}}, r"evaluation\.min_delta: must be >= 0"),
        (
            {"evaluation": {"patience": 2}, "objective": {"metric": "train_examples_per_second"}},
            r"evaluation\.patience: needs a first objective that is a metric of the model",
        ),
    ],
)
def test_a_patience_that_cannot_work_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StudyFileError, match=message):
        load_study(write_study(tmp_path, **changes))
