"""A trial trained again from its record."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed_trials import weights_of
from support.tiny import tiny_executor

from hpo.training.checkpoint import bits_digest
from hpo.training.evaluate import Evaluation
from hpo.trial.executor import Executor
from hpo.trial.reproduction import reproduce
from hpo.trial.telemetry import Callbacks, StoredTrial

PARAMS = {"learning_rate": 5e-4, "fp_precision": "fp32"}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = tmp_path_factory.mktemp("study")
    training = {"max_steps": 6, "batch_size": 8, "max_length": 64}
    return tiny_executor(folder, training=training, evaluation={"per_trial": 2})


def recorded(executor: Executor, folder: Path, params: Any = PARAMS, stop_after: int = 0) -> StoredTrial:
    """Run a trial and return its record. With `stop_after` it is stopped and resumed after a few steps."""
    evaluations: dict[int, Mapping[str, Any]] = {}

    def note(scored: Evaluation) -> None:
        evaluations[scored.step] = {"score": scored.values[0], **scored.metrics}

    if stop_after:
        asked = itertools.count(1)
        stopping = Callbacks(note, should_stop=lambda: next(asked) == stop_after)
        assert executor.run(params, folder, "trial", stopping).outcome == "preempted"
    result = executor.run(params, folder, "trial", Callbacks(note))
    assert result.outcome == "complete", result.reason
    return StoredTrial(7, params, result.telemetry, evaluations=evaluations)


@pytest.mark.parametrize("stop_after", [0, 4])
def test_trial_is_reproduced(executor: Executor, tmp_path: Path, stop_after: int) -> None:
    record = recorded(executor, tmp_path / "trial", stop_after=stop_after)
    assert record.telemetry["num_steps"] == 6
    found = reproduce(executor, record, tmp_path / "again")
    assert (found.same, found.weights, found.results, found.conditions) == (True, "same", (), ())
    assert "is reproduced bit for bit" in found.text()
    assert (found.outcome, found.num_evaluations, found.as_json()["same"]) == ("complete", 2, True)
    assert bits_digest(weights_of(tmp_path / "again")) == record.telemetry["weights_digest"]
    assert found.cautions == (("The trial was resumed at step 3.",) if stop_after else ())


def test_different_bit_of_a_metric(executor: Executor, tmp_path: Path) -> None:
    record = recorded(executor, tmp_path / "trial")
    criteria = record.evaluations[6]["criteria"]
    value = criteria["f1_macro"]
    criteria["f1_macro"] = last_bit = math.nextafter(value, 2.0)
    found = reproduce(executor, record, tmp_path / "again")
    (difference,) = found.results
    assert (found.same, found.weights) == (False, "same")
    label = "evaluation 2: criteria/f1_macro"
    assert (difference.name, difference.recorded, difference.now) == (label, last_bit, value)


def test_budget_of_seconds_is_reproduced_in_steps(executor: Executor, tmp_path: Path) -> None:
    record = recorded(executor, tmp_path / "trial", {**PARAMS, "max_seconds": 0.2})
    found = reproduce(executor, record, tmp_path / "again")
    assert found.outcome == "complete"
    assert "num_steps" not in [one.name for one in found.conditions]
    (caution,) = found.cautions
    assert caution.startswith("The budget was 0.2 seconds, so learning rates followed the clock.")


def test_recorded_fp32_parts_are_used(executor: Executor, tmp_path: Path) -> None:
    """`auto` may have found them for a trial with another seed."""
    params = {**PARAMS, "fp_precision": "bf16", "fp32_parts": ["heads"]}
    record = recorded(executor, tmp_path / "trial", params)
    searched = replace(record, params={**params, "fp32_parts": "auto"})
    assert reproduce(executor, searched, tmp_path / "again").same
    other = replace(record, telemetry={**record.telemetry, "fp32_parts": {"resolved": []}})
    found = reproduce(executor, other, tmp_path / "other")
    assert (found.same, found.weights) == (False, "different")


def test_digest_depends_on_bits_names_and_shapes() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.0, dtype=torch.bfloat16)}
    digest = bits_digest(weights)
    assert digest == bits_digest(dict(reversed(weights.items())))
    assert digest == bits_digest({**weights, "a": weights["a"].T.contiguous().T}), "the layout has no part"
    negative = weights["a"].clone()
    negative[0, 0] = -0.0
    for other in (
        {"a": negative},
        {"a": weights["a"].reshape(3, 2)},
        {"a": weights["a"].int()},
        {"b": weights["b"].half()},
        {"c": weights["b"]},
    ):
        assert bits_digest({**weights, **other}) != digest
