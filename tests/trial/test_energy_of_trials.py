"""Energy as an objective, a limit and a fact of a trial; the counter of a GPU is played here."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny import TRAINING, tiny_executor

import hpo.training.loop as loop_module
import hpo.trial.executor as executor_module
from hpo.errors import InputError
from hpo.outcome import TrialResult
from hpo.training.checkpoint import CheckpointStore

ENERGY = "train_joules_per_example"
OBJECTIVE = {"metric": ENERGY, "direction": "minimize"}
STEPS = TRAINING | {"max_steps": 40, "fp_precision": "fp32"}


class PlayedGpu:
    """A GPU's energy: five joules for each step, many for all else."""

    missing = ""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joules = 1000.0
        monkeypatch.setattr(executor_module, "EnergyCounter", lambda *_, **__: self)
        monkeypatch.setattr("hpo.training.throughput.MIN_STRETCH_SECONDS", 0.0)
        self.spend(monkeypatch, loop_module, "apply_gradients", 5.0)
        self.spend(monkeypatch, loop_module, "predict_logits", 1e6)
        self.spend(monkeypatch, CheckpointStore, "save", 1e6)

    def spend(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, joules: float) -> None:
        function = getattr(owner, name)

        def spending(*args: Any, **options: Any) -> Any:
            self.joules += joules
            return function(*args, **options)

        monkeypatch.setattr(owner, name, spending)

    def read_joules(self) -> float:
        return self.joules


def run(folder: Path, checkpoints: Path | None = None, **changes: Any) -> TrialResult:
    """One trial of 40 steps of eight examples, with an evaluation after each ten."""
    content = {"training": STEPS, "evaluation": {"per_trial": 4}, **changes}
    return tiny_executor(folder, **content).run({"learning_rate": 1e-3}, checkpoints, "key")


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_only_training_steps_count(tmp_path: Path, monkeypatch: Any, has_checkpoints: bool) -> None:
    """Neither evaluations nor copies for checkpoints count."""
    PlayedGpu(monkeypatch)
    folder, checkpoint = (tmp_path / "trial", {"every_seconds": 1e-6}) if has_checkpoints else (None, {})
    result = run(tmp_path, folder, objective=OBJECTIVE, checkpoint=checkpoint)
    assert (str(result.outcome), result.values) == ("complete", (5 / 8,)), result.reason
    assert result.headline[ENERGY] == result.telemetry["throughput"][ENERGY] == 5 / 8
    assert result.telemetry["energy_missing"] == ""


def test_energy_limit_ends_a_trial_at_an_evaluation(tmp_path: Path, monkeypatch: Any) -> None:
    PlayedGpu(monkeypatch)
    result = run(tmp_path, constraints={ENERGY: {"max": 0.5}})
    assert (str(result.outcome), result.telemetry["num_steps"]) == ("pruned", 20)
    assert result.reason == f"{ENERGY} must be <= 0.5, but is 0.625."
    assert result.constraints == {ENERGY: pytest.approx(0.25)}


def test_study_of_energy_needs_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = r"needs an NVIDIA GPU \(Volta or newer\) .* nvidia-ml-py, but this is not an NVIDIA GPU but"
    for section, content in (("objective", OBJECTIVE), ("constraints", {ENERGY: {"max": 1.0}})):
        with pytest.raises(InputError, match=needed):
            run(tmp_path, **{section: content})
    PlayedGpu(monkeypatch)
    monkeypatch.setattr("hpo.training.throughput.MIN_STRETCH_SECONDS", 1e6)
    result = run(tmp_path, objective=OBJECTIVE)
    assert str(result.outcome) == "incompatible"
    assert "the training was too short" in result.reason
