"""A trial that is known to break a limit ends then; what is only known at the end is judged there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.command_line import hpo_command, ok, stored
from support.tiny import tiny_executor, write_study

from hpo.trial.callbacks import Callbacks
from hpo.trial.telemetry import ScoredEvaluation, TrialResult

STEPS = {"max_steps": 40, "batch_size": 8, "max_length": 64, "dropout": 0.0}
PARAMS = {"learning_rate": 1e-3}


def run(folder: Path, limits: dict[str, Any], **changes: Any) -> tuple[TrialResult, list[ScoredEvaluation]]:
    """One trial of 40 steps with four evaluations, and those that it made."""
    content = {"training": STEPS, "evaluation": {"per_trial": 4}, "constraints": limits, **changes}
    made: list[ScoredEvaluation] = []
    result = tiny_executor(folder, **content).run(PARAMS, None, "", Callbacks(made.append))
    return result, made


def test_memory_ends_it_after_a_step(tmp_path: Path) -> None:
    slow = {"train_examples_per_second": {"min": 1e9}}  # of which nothing is known yet
    result, evaluations = run(tmp_path, {"peak_memory_bytes": {"max": 1e6}, **slow})
    assert (str(result.outcome), result.telemetry["num_steps"], evaluations) == ("pruned", 1, [])
    assert result.reason.startswith("peak_memory_bytes must be <= 1e+06, but is ")
    assert result.constraints["peak_memory_bytes"] > 10
    assert result.constraints["train_examples_per_second"] == 0


@pytest.mark.parametrize("metric", ["train_tokens_per_second", "evaluation_examples_per_second"])
def test_a_speed_ends_a_trial_at_an_evaluation_after_the_warm_up(tmp_path: Path, metric: str) -> None:
    """The warm-up has three of ten steps. The first evaluation may be of a cold start."""
    result, evaluations = run(tmp_path, {metric: {"min": 1e9}, "score": {"min": 0.99}})
    assert (str(result.outcome), len(evaluations)) == ("pruned", 2)
    value = result.telemetry["throughput"][metric]
    assert result.reason == f"{metric} must be >= 1e+09, but is {value:.6g}."
    assert result.constraints[metric] == pytest.approx(1.0, abs=1e-3)
    assert 0 < result.constraints["score"] <= 1, "as far as it has got"


def test_a_metric_is_judged_at_the_end(tmp_path: Path) -> None:
    limits = {"criteria/f1_macro": {"min": 0.999}, "peak_memory_bytes": {"min": 1e15, "max": 1e16}}
    result, evaluations = run(tmp_path, limits)
    assert (str(result.outcome), len(evaluations)) == ("complete", 4)
    value = result.telemetry["metrics"]["criteria"]["f1_macro"]
    assert f"criteria/f1_macro must be >= 0.999, but is {value:.6g}." in result.reason
    assert result.constraints["criteria/f1_macro"] == pytest.approx(1 - value / 0.999)


def test_limits_that_are_met_change_nothing(tmp_path: Path) -> None:
    limits = {
        "peak_memory_bytes": {"max": 1e15},
        "train_examples_per_second": {"min": 1e-3},
        "score": {"min": -1},
    }
    (limited, _), (free, _) = (run(tmp_path, one) for one in (limits, {}))
    assert limited.values == free.values
    assert (str(limited.outcome), limited.reason) == ("complete", "")
    assert all(value <= 0 for value in limited.constraints.values())
    assert free.constraints == {}


def test_a_trial_that_ends_at_a_limit_does_not_pause(tmp_path: Path) -> None:
    """Where it would: its slot is done, and the study goes on."""
    write_study(
        tmp_path,
        constraints={"train_examples_per_second": {"min": 1e9}},
        training=STEPS,
        pruner={"name": "promote", "starts": 0.5, "keep": 1},
    )
    finished = hpo_command(tmp_path, "run", "tiny.yaml", width=1000)
    assert finished.exit_code == 1, "no trial is complete"
    record = stored(tmp_path)
    assert record.counts == {"open": 0, "running": 0, "done": 2}
    for trial in record.trials:
        assert (trial.outcome, len(trial.evaluations)) == ("pruned", 1)
        assert "train_examples_per_second must be >= 1e+09" in trial.reason
    said = "Ended early over a limit: 2 trials."
    assert said in ok(hpo_command(tmp_path, "status", "tiny.yaml", width=1000)).out
