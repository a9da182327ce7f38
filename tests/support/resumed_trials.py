"""Trials that are stopped and resumed, and end as trials that nobody stopped."""

import itertools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hpo.outcome import TrialResult
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks


def run_trial(executor: Executor, checkpoints: Path, stop_at: int = 0, **params: Any) -> TrialResult:
    """Run the trial. Stop it when it asks for the `stop_at`-th time whether to stop."""
    asked = itertools.count(1)
    callbacks = Callbacks(should_stop=lambda: next(asked) == stop_at)
    return executor.run(params, checkpoints, "trial", callbacks)


def weights_of(checkpoints: Path) -> dict[str, torch.Tensor]:
    """Read the best weights of the trial."""
    return load_file(next(checkpoints.glob("best-*/model.safetensors")))


def check_resume_is_exact(executor: Executor, folder: Path, stop_at: int = 5, **params: Any) -> TrialResult:
    """Compare all bits of a trial in `folder / "whole"` and of one that stops and resumes.

    Returns the result of the latter.
    """
    whole = run_trial(executor, folder / "whole", **params)
    assert whole.outcome == "complete", whole.reason
    assert run_trial(executor, folder / "cut", stop_at, **params).outcome == "preempted"
    resumed = run_trial(executor, folder / "cut", **params)
    assert resumed.telemetry["resumed_from_step"] > 0
    assert resumed.values == whole.values
    for name in ("metrics", "scaler", "num_steps"):
        assert resumed.telemetry[name] == whole.telemetry[name]
    check_same_weights(folder / "whole", folder / "cut")
    return resumed


def check_same_weights(*checkpoints: Path) -> None:
    """Compare all bits of the best weights of two trials."""
    first, second = map(weights_of, checkpoints)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
