"""Energy as an objective, a limit and a fact of a trial; the counter of a GPU is played here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_executor

import hpo.training.loop as loop_module
import hpo.trial.executor as executor_module
from hpo.errors import InputError
from hpo.outcome import TrialResult
from hpo.training.checkpoint import CheckpointStore
from hpo.training.evaluate import Evaluation
from hpo.trial.executor import NO_CALLBACKS
from hpo.trial.telemetry import Callbacks

ENERGY = "train_joules_per_example"
OBJECTIVE = {"metric": ENERGY, "direction": "minimize"}
STEPS = {"max_steps": 40, "batch_size": 8, "max_length": 64, "dropout": 0.0, "fp_precision": "fp32"}
PARAMS = {"learning_rate": 1e-3}


class PlayedGpu:
    """A GPU's energy: `per_step` joules for each step, many for all else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joules, self.per_step, self.missing = 1000.0, 5.0, ""
        monkeypatch.setattr(executor_module, "EnergyCounter", lambda *_, **__: self)
        monkeypatch.setattr("hpo.training.throughput.MIN_STRETCH_SECONDS", 0.0)
        for owner, name, joules in (
            (loop_module, "apply_gradients", None),
            (loop_module, "predict_logits", 1e6),
            (CheckpointStore, "save", 1e6),
        ):
            monkeypatch.setattr(owner, name, self._spending(getattr(owner, name), joules))

    def _spending(self, function: Callable[..., Any], joules: float | None) -> Callable[..., Any]:
        def spend(*args: Any, **options: Any) -> Any:
            self.joules += self.per_step if joules is None else joules
            return function(*args, **options)

        return spend

    def read_joules(self) -> float:
        return self.joules


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    return PlayedGpu(monkeypatch)


def run(
    folder: Path, callbacks: Callbacks = NO_CALLBACKS, checkpoints: Path | None = None, **changes: Any
) -> TrialResult:
    """One trial of 40 steps of eight examples, with an evaluation after each ten."""
    content = {"training": STEPS, "evaluation": {"per_trial": 4}, **changes}
    return tiny_executor(folder, **content).run(PARAMS, checkpoints, "key", callbacks)


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_only_training_steps_count(tmp_path: Path, gpu: PlayedGpu, has_checkpoints: bool) -> None:
    """Neither evaluations nor copies for checkpoints count."""
    made: list[Evaluation] = []
    folder, checkpoint = (tmp_path / "trial", {"every_seconds": 1e-6}) if has_checkpoints else (None, {})
    result = run(tmp_path, Callbacks(made.append), folder, objective=OBJECTIVE, checkpoint=checkpoint)
    assert (str(result.outcome), result.values) == ("complete", (gpu.per_step / 8,)), result.reason
    assert result.headline[ENERGY] == result.telemetry["throughput"][ENERGY] == 5 / 8
    assert result.telemetry["energy_missing"] == ""
    assert [one.rates[ENERGY] for one in made] == [5 / 8] * 4


def test_energy_limit_ends_a_trial_at_an_evaluation(tmp_path: Path, gpu: PlayedGpu) -> None:
    assert gpu.per_step == 5.0
    result = run(tmp_path, constraints={ENERGY: {"max": 0.5}})
    assert (str(result.outcome), result.telemetry["num_steps"]) == ("pruned", 20)
    assert result.reason == f"{ENERGY} must be <= 0.5, but is 0.625."
    assert result.constraints == {ENERGY: pytest.approx(0.25)}
    assert run(tmp_path, constraints={ENERGY: {"max": 0.7}}).constraints[ENERGY] < 0


def test_resumed_trial_keeps_its_energy(tmp_path: Path, gpu: PlayedGpu) -> None:
    folder, asked = tmp_path / "trial", itertools.count(1)
    stopped = run(tmp_path, Callbacks(should_stop=lambda: next(asked) > 30), folder)
    assert str(stopped.outcome) == "preempted"
    counted = stopped.telemetry["num_steps"] // 10 * 10 - 3  # up to the last evaluation, without the warm-up
    assert counted > 0
    gpu.per_step, left = 15.0, 40 - stopped.telemetry["num_steps"]
    result = run(tmp_path, checkpoints=folder)
    assert result.telemetry["resumed_from_step"] == 40 - left
    expected = (counted * 5 + left * 15) / (8 * (counted + left))
    assert result.headline[ENERGY] == pytest.approx(expected)


def test_short_stretches_have_no_energy(
    tmp_path: Path, gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpo.training.throughput.MIN_STRETCH_SECONDS", 1e6)
    result = run(tmp_path)
    assert ENERGY not in result.headline
    result = run(tmp_path, objective=[{"metric": "score"}, OBJECTIVE])
    assert str(result.outcome) == "incompatible"
    assert "the training was too short" in result.reason
    gpu.missing = "the counter is gone."
    result = run(tmp_path)
    assert result.telemetry["energy_missing"] == "the counter is gone."


@pytest.mark.parametrize(
    "changes", [{"objective": OBJECTIVE}, {"constraints": {ENERGY: {"max": 1.0}}}], ids=["objective", "limit"]
)
def test_study_of_energy_needs_a_counter(tmp_path: Path, changes: dict[str, Any]) -> None:
    needed = r"needs an NVIDIA GPU \(Volta or newer\) .* nvidia-ml-py, but this is not an NVIDIA GPU but"
    with pytest.raises(InputError, match=needed):
        run(tmp_path, **changes)
