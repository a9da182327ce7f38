"""Trainings that are made again: from the beginning, and from a state with other settings."""

from __future__ import annotations

from typing import Any

import pytest
from broken_models import TRAINING, altered

from hpo.trial.executor import Executor
from hpo.trial.replay import Replay, State
from hpo.trial.trial_parts import build_trial


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    training = TRAINING | {"max_steps": 20, "warmup_ratio": 0.0, "schedule": "constant"}
    space = {"weight_decay": {"type": "float", "low": 0.0, "high": 0.1}}
    return altered(tmp_path_factory.mktemp("replay"), training=training, search_space=space)


def replay(executor: Executor, name: str, start: State | None = None, **settings: Any) -> Replay:
    params = {**settings, "fp_precision": name}
    return Replay(build_trial(executor.study, executor.device, params, executor.loader), start)


def test_a_state_does_not_bring_its_learning_rates(executor: Executor) -> None:
    """Else a lower one would be tried in name alone."""
    first = replay(executor, "fp32", learning_rate=1e-3)
    assert first.run(7) is None
    before = first.snapshots[0]
    assert before["progress"]["step"] == 3
    lower = replay(executor, "fp32", before, learning_rate=1e-5, head_learning_rate=1e-4)
    lower.run(6)
    rates = {group["name"]: (group["initial_lr"], group["lr"]) for group in lower.optimizer.param_groups}
    assert rates["encoder"] == (1e-5, 1e-5)
    assert rates["heads"] == (1e-4, 1e-4)
    moments = next(iter(lower.optimizer.state_dict()["state"].values()))
    assert moments["step"] == 6, "the state itself goes on"
