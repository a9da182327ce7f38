"""Parts in fp32 after a kill, in the best model and in an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny import CPU, ENCODER, altered_executor
from trial.test_part_search import SECOND, enlarge

import hpo
from hpo.inference import model as inference
from hpo.outcome import TrialResult
from hpo.precision.parts import float32_modules
from hpo.trial.best_model import TrialSource, export_checkpoint, with_scores
from hpo.trial.executor import Executor

STUDY: dict[str, Any] = {
    "model": {"encoder": ENCODER | {"num_hidden_layers": 1}},
    "training": {
        "max_steps": 6,
        "batch_size": 8,
        "max_length": 64,
        "dropout": 0.0,
        "fp_precision": "fp16",
        "fp32_parts": "auto",
    },
    "checkpoint": {"every_seconds": 0.001},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Executor, Path, TrialResult]:
    folder = tmp_path_factory.mktemp("trial")
    executor = altered_executor(folder, enlarge(SECOND), **STUDY)
    result = executor.run({}, folder / "checkpoints", "trial")
    assert result.outcome == "complete", result.reason
    return executor, folder / "checkpoints", result


def test_best_model_has_the_parts(trained: tuple[Executor, Path, TrialResult]) -> None:
    """Without them its logits would not be finite."""
    executor, folder, result = trained
    scored, statistics = with_scores(executor, folder, {}, result, "validation")
    assert scored.outcome == "complete", scored.reason
    assert statistics


def test_export_has_the_parts(
    trained: tuple[Executor, Path, TrialResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, folder, _ = trained
    monkeypatch.setattr(inference, "probe_device", lambda _: replace(CPU, cpu_features=FP16))
    exported = export_checkpoint(executor, folder, tmp_path / "export", TrialSource(0))
    model = hpo.load(exported, device="cpu", precision="fp16")
    assert [*float32_modules(model.network)] == [SECOND]
    text = {"text": "The rent is too high.", "segments": {}}
    assert model.predict([text["text"]])[0]
    model.use("cpu", "bf16-true")
    assert not float32_modules(model.network)
    model.use("cpu", "fp16")
    assert [*float32_modules(model.network)] == [SECOND]


FP16 = frozenset({"avx512_fp16", "avx512_bf16", "amx_bf16", "amx_fp16"})
