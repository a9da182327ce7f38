"""Limits: a trial ends as soon as it certainly breaks one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_executor

from hpo.outcome import TrialResult
from hpo.training.evaluate import Evaluation
from hpo.trial.telemetry import Callbacks

STEPS = {"max_steps": 40, "batch_size": 8, "max_length": 64, "dropout": 0.0}
PARAMS = {"learning_rate": 1e-3}


def run(folder: Path, limits: dict[str, Any], **changes: Any) -> tuple[TrialResult, list[Evaluation]]:
    """Run a trial of 40 steps with up to four evaluations; return both."""
    content = {"training": STEPS, "evaluation": {"per_trial": 4}, "constraints": limits, **changes}
    made: list[Evaluation] = []
    result = tiny_executor(folder, **content).run(PARAMS, None, "", Callbacks(made.append))
    return result, made


def test_memory_limit_ends_a_trial_after_a_step(tmp_path: Path) -> None:
    slow = {"train_examples_per_second": {"min": 1e9}}  # not measured yet
    result, evaluations = run(tmp_path, {"peak_memory_bytes": {"max": 1e6}, **slow})
    assert (str(result.outcome), result.telemetry["num_steps"], evaluations) == ("pruned", 1, [])
    assert result.reason.startswith("peak_memory_bytes must be <= 1e+06, but is ")
    assert result.constraints["peak_memory_bytes"] > 10
    assert result.constraints["train_examples_per_second"] == 0


@pytest.mark.parametrize("metric", ["train_tokens_per_second", "evaluation_examples_per_second"])
def test_speed_limit_ends_a_trial_after_the_warm_up(tmp_path: Path, metric: str) -> None:
    """The warm-up has three of ten steps. The first evaluation may be of a cold start."""
    result, evaluations = run(tmp_path, {metric: {"min": 1e9}, "score": {"min": 0.99}})
    assert (str(result.outcome), len(evaluations)) == ("pruned", 2)
    value = result.telemetry["throughput"][metric]
    assert result.reason == f"{metric} must be >= 1e+09, but is {value:.6g}."
    assert result.constraints[metric] == pytest.approx(1.0, abs=1e-3)
    assert 0 < result.constraints["score"] <= 1, "the metric so far"


def test_metric_limit_is_judged_at_the_end(tmp_path: Path) -> None:
    limits = {"criteria/f1_macro": {"min": 0.999}, "peak_memory_bytes": {"min": 1e15, "max": 1e16}}
    result, evaluations = run(tmp_path, limits)
    assert (str(result.outcome), len(evaluations)) == ("complete", 4)
    value = result.telemetry["metrics"]["criteria"]["f1_macro"]
    assert f"criteria/f1_macro must be >= 0.999, but is {value:.6g}." in result.reason
    assert result.constraints["criteria/f1_macro"] == pytest.approx(1 - value / 0.999)


def test_met_limits_change_nothing(tmp_path: Path) -> None:
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
