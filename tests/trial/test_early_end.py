"""Patience: the early end of a complete trial."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.resumed_trials import check_resume_is_exact
from support.tiny import tiny_executor, write_study

from hpo.config.limits import ObjectiveConfig
from hpo.config.sections import EvaluationConfig
from hpo.config.study_config import load_study
from hpo.errors import StudyFileError
from hpo.training.evaluate import Evaluation
from hpo.trial.objectives import patience_over
from hpo.trial.telemetry import Callbacks

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
def test_patience_counts_evaluations_without_improvement(
    values: list[float], direction: Any, min_delta: float, expected: int
) -> None:
    objective = ObjectiveConfig(direction=direction)
    reason = patience_over(values, objective, EvaluationConfig(patience=1, min_delta=min_delta))
    assert bool(reason) == bool(expected)
    assert not expected or f" in {expected} evaluations" in reason


def test_trial_without_improvement_is_complete(tmp_path: Path) -> None:
    made: list[Evaluation] = []
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


def test_patience_ends_with_the_budget(tmp_path: Path) -> None:
    study = {"training": STEPS, "evaluation": {"per_trial": 3, "patience": 2}}
    result = tiny_executor(tmp_path, **study).run(UNCHANGED, None, "")
    assert (result.telemetry["num_steps"], result.reason) == (40, "")


def test_resumed_trial_counts_earlier_evaluations(tmp_path: Path) -> None:
    study = {"training": STEPS, "evaluation": {"per_trial": 8, "patience": 3}}
    result = check_resume_is_exact(tiny_executor(tmp_path, **study), tmp_path, 13, **UNCHANGED)
    assert result.telemetry["resumed_from_step"] == 11
    assert result.telemetry["num_steps"] == 20


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
def test_invalid_patience(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyFileError, match=message):
        load_study(write_study(tmp_path, **changes))
