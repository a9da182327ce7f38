"""Trials whose optimiser keeps its state in fewer bits: what is stored, and a restart bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import ENCODER, tiny_executor

from hpo.outcome import Outcome
from hpo.trial.callbacks import Callbacks
from hpo.trial.telemetry import TrialResult

WIDE = {**ENCODER, "hidden_size": 64, "intermediate_size": 128}  # of which blocks of 256 divide the matrices
TRAINING = {"max_steps": 8, "batch_size": 8, "max_length": 64, "learning_rate": 1e-3}


def train(folder: Path, checkpoints: Path, stop_at: int = 0, **settings: Any) -> TrialResult:
    study = {"model": {"encoder": WIDE}, "training": TRAINING | settings, "search_space": {}}
    executor = tiny_executor(folder, **study, evaluation={"per_trial": 2})
    asked = iter(range(1, 10**6))
    callbacks = Callbacks(should_stop=lambda: next(asked) == stop_at)
    return executor.run({}, checkpoints, "trial", callbacks)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("best-*/model.safetensors")))


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("fp32", "bf16"), ("fp16", "int8"), ("bf16-true", "int8"), ("bf16-true", "bf16")],
)
def test_a_trial_goes_on_bit_for_bit(tmp_path: Path, precision: str, kind: str) -> None:
    settings = {"optimizer_state": kind, "fp_precision": precision}
    whole = train(tmp_path, tmp_path / "whole", **settings)
    assert whole.outcome == Outcome.COMPLETE, whole.reason
    cut = train(tmp_path, tmp_path / "cut", stop_at=5, **settings)
    assert cut.outcome == Outcome.PREEMPTED
    resumed = train(tmp_path, tmp_path / "cut", **settings)
    assert resumed.telemetry["resumed_from_step"] > 0
    assert resumed.values == whole.values
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_what_is_kept_is_stored(tmp_path: Path) -> None:
    names = ["fp32", "bf16", "int8"]
    kept = {
        name: train(tmp_path, tmp_path / name, optimizer_state=name).telemetry["optimizer_state"]
        for name in names
    }
    assert [kept[name]["effective"] for name in names] == names
    assert [kept[name]["requested"] for name in names] == names
    assert kept["fp32"]["bytes"] == kept["fp32"]["fp32_bytes"] == kept["int8"]["fp32_bytes"]
    sizes = [kept[name]["bytes"] for name in names]
    assert sizes == sorted(sizes, reverse=True)
    assert kept["int8"]["dtypes"]["uint8"] == 2 * 12  # the two moments of six matrices of each of two layers
    assert kept["int8"]["dtypes"]["float32"] > 0, "embeddings keep fp32"


def test_a_model_that_is_too_small_says_that_its_state_is_fp32(tmp_path: Path) -> None:
    small = {**ENCODER, "hidden_size": 16, "intermediate_size": 32}
    study = {"model": {"encoder": small}, "training": TRAINING | {"optimizer_state": "int8"}}
    executor = tiny_executor(tmp_path, **study, search_space={})
    kept = executor.run({}, None, "trial").telemetry["optimizer_state"]
    assert (kept["requested"], kept["effective"]) == ("int8", "fp32")
    assert kept["reason"] == "no matrix of the model is large enough."
