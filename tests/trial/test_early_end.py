"""Trials that end early: without improvement, or because they certainly break a limit."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.resumed_trials import check_resume_is_exact
from support.tiny import TRAINING, tiny_executor, tiny_study

from hpo.config.limits import ObjectiveConfig
from hpo.config.sections import EvaluationConfig
from hpo.errors import StudyFileError
from hpo.outcome import TrialResult
from hpo.training.evaluate import Evaluation
from hpo.trial.objectives import patience_over
from hpo.trial.telemetry import Callbacks

STEPS = TRAINING | {"max_steps": 40}
UNCHANGED = {"learning_rate": 1e-30}
"""A rate that leaves the weights, and so the score, as they are."""


@pytest.mark.parametrize(
    ("values", "direction", "min_delta", "expected"),
    [
        ([], "maximize", 0.0, 0),
        ([0.5, 0.5, 0.5], "maximize", 0.0, 2),
        ([0.5, 0.7, 0.6, 0.65], "maximize", 0.0, 2),
        ([0.5, 0.55, 0.58], "maximize", 0.1, 2),
        ([0.5, 0.55, 0.61], "maximize", 0.1, 0),
        ([0.5, 0.4, 0.45, 0.39], "minimize", 0.0, 0),
        ([0.5, 0.4, 0.45, 0.39], "minimize", 0.05, 2),
        ([math.nan, 0.5, math.nan], "maximize", 0.0, 1),
    ],
)
def test_patience(values: list[float], direction: Any, min_delta: float, expected: int) -> None:
    objective = ObjectiveConfig(direction=direction)
    reason = patience_over(values, objective, EvaluationConfig(patience=1, min_delta=min_delta))
    assert bool(reason) == bool(expected)
    assert not expected or f" in {expected} evaluations" in reason


def run(folder: Path, params: dict[str, Any], **study: Any) -> tuple[TrialResult, list[Evaluation]]:
    """Run a trial of 40 steps; return its evaluations, too."""
    made: list[Evaluation] = []
    executor = tiny_executor(folder, **{"training": STEPS, "evaluation": {"per_trial": 4}, **study})
    return executor.run(params, folder / "trial", "", Callbacks(made.append)), made


def test_trial_without_improvement_is_complete(tmp_path: Path) -> None:
    result, made = run(tmp_path, UNCHANGED, evaluation={"per_trial": 8, "patience": 2})
    assert (str(result.outcome), len(made)) == ("complete", 3)
    assert result.values == made[0].values
    assert (result.telemetry["num_steps"], result.telemetry["stopped_early"]) == (15, result.reason)
    reason = "score has not improved in 2 evaluations (evaluation.patience)."
    assert result.reason == f"Training ended early at step 15, at 38% of its budget: {reason}"
    result, _ = run(tmp_path, UNCHANGED, evaluation={"per_trial": 3, "patience": 2})
    assert (result.telemetry["num_steps"], result.reason) == (40, "")


def test_resumed_trial_counts_earlier_evaluations(tmp_path: Path) -> None:
    study = {"training": STEPS, "evaluation": {"per_trial": 8, "patience": 3}}
    result = check_resume_is_exact(tiny_executor(tmp_path, **study), tmp_path, 13, **UNCHANGED)
    assert (result.telemetry["resumed_from_step"], result.telemetry["num_steps"]) == (11, 20)


def test_memory_limit_ends_a_trial_after_a_step(tmp_path: Path) -> None:
    limits = {"peak_memory_bytes": {"max": 1e6}, "train_examples_per_second": {"min": 1e9}}
    result, made = run(tmp_path, {}, constraints=limits)
    assert (str(result.outcome), result.telemetry["num_steps"], made) == ("pruned", 1, [])
    assert result.reason.startswith("peak_memory_bytes must be <= 1e+06, but is ")
    assert result.constraints["peak_memory_bytes"] > 10
    assert result.constraints["train_examples_per_second"] == 0, "not measured yet"


@pytest.mark.parametrize("metric", ["train_tokens_per_second", "evaluation_examples_per_second"])
def test_speed_limit_ends_a_trial_after_the_warm_up(tmp_path: Path, metric: str) -> None:
    """The warm-up has three of ten steps. The first evaluation may be of a cold start."""
    limits = {metric: {"min": 1e9}, "score": {"min": 0.99}}
    result, made = run(tmp_path, {"learning_rate": 1e-3}, constraints=limits)
    assert (str(result.outcome), len(made)) == ("pruned", 2)
    value = result.telemetry["throughput"][metric]
    assert result.reason == f"{metric} must be >= 1e+09, but is {value:.6g}."
    assert result.constraints[metric] == pytest.approx(1.0, abs=1e-3)
    assert 0 < result.constraints["score"] <= 1, "the metric so far"


def test_metric_limit_is_judged_at_the_end(tmp_path: Path) -> None:
    limits = {"peak_memory_bytes": {"max": 1e15}, "train_examples_per_second": {"min": 1e-3}}
    limits["criteria/f1_macro"] = {"min": 0.999}
    result, made = run(tmp_path, {"learning_rate": 1e-3}, constraints=limits)
    assert (str(result.outcome), len(made)) == ("complete", 4)
    value = result.telemetry["metrics"]["criteria"]["f1_macro"]
    assert result.reason == f"criteria/f1_macro must be >= 0.999, but is {value:.6g}."
    assert result.constraints.pop("criteria/f1_macro") == pytest.approx(1 - value / 0.999)
    assert max(result.constraints.values()) < 0


def test_patience_needs_a_metric_of_the_model(tmp_path: Path) -> None:
    changes = {"evaluation": {"patience": 2}, "objective": {"metric": "train_examples_per_second"}}
    with pytest.raises(StudyFileError, match=r"evaluation\.patience: needs a first objective that is a metr"):
        tiny_study(tmp_path, **changes)
    with pytest.raises(StudyFileError, match=r"evaluation\.min_delta: .*needs `patience`"):
        tiny_study(tmp_path, evaluation={"min_delta": 0.1})
