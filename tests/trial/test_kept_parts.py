"""Parts in fp32 after a kill, in the best model and in an export."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed_trials import weights_of
from support.tiny import CPU, ENCODER, altered_executor
from support.worker_process import run_until_killed
from trial.test_part_search import SECOND, enlarge

import hpo
from hpo.inference import model as inference
from hpo.precision.parts import float32_modules
from hpo.study.store.storage import open_storage
from hpo.trial.best_model import TrialSource, export_checkpoint, with_scores
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks, Progress, TrialResult

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


def run(folder: Path, url: str, checkpoints: str, killed_at: int | None = None) -> TrialResult:
    """Run a trial with one module in fp32, to its end or until it kills its process."""

    def on_progress(progress: Progress) -> None:
        if progress.step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    executor = altered_executor(folder, enlarge(SECOND), **STUDY)
    with open_storage(url) as storage:
        executor.cache = storage
        return executor.run({}, folder / checkpoints, "trial", Callbacks(on_progress=on_progress))


def test_killed_trial_resumes_with_its_found_parts(tmp_path: Path, sqlite_url: str) -> None:
    run_until_killed(run, tmp_path, sqlite_url, "cut", killed_at=4)
    resumed = run(tmp_path, sqlite_url, "cut")
    whole = run(tmp_path, sqlite_url, "whole")
    assert resumed.telemetry["resumed_from_step"] > 0
    assert resumed.telemetry["compatibility"]["cached"]
    assert [*resumed.telemetry["fp32_parts"]["resolved"]] == [SECOND]
    assert resumed.telemetry["fp32_parts"] == whole.telemetry["fp32_parts"]
    assert resumed.values == whole.values
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


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
