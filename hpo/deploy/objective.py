"""The objectives `deployed_int8/...`: what a trial's best weights are worth in ONNX int8 on a CPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpo.config.study_config import DEPLOYED_LATENCY, DEPLOYED_SCORE
from hpo.config.trial_config import TrialConfig
from hpo.data.token_cache import load_tokenized
from hpo.deploy.artifacts import OBJECTIVES_ARTIFACT
from hpo.deploy.making import Workshop
from hpo.deploy.onnx_export import export_onnx
from hpo.deploy.scoring import answers
from hpo.deploy.timing import Effort, batches_untold, rows_of, time_in_turn, timing
from hpo.device import probe_device
from hpo.errors import HpoError, ModelError
from hpo.inference.model import TrainedModel
from hpo.models.export import ExportSettings
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome
from hpo.trial.best_model import export_checkpoint
from hpo.trial.executor import Executor
from hpo.trial.objectives import objective_value
from hpo.trial.provenance import TrialSource
from hpo.trial.telemetry import TrialResult

EFFORT = Effort(rounds=5, seconds=20.0)


def check_export(executor: Executor, network: MultitaskModel, config: TrialConfig) -> None:
    """Raise ModelError where a study's model, here untrained, cannot be exported to ONNX."""
    loader = executor.loader
    if config.attention.startswith("flash"):  # which ONNX has not; the same weights run with another one
        network = loader.build_model(config.model_copy(update={"attention": "sdpa"}))
    settings = ExportSettings(windowing=loader.windowing(config), attention="sdpa", precision="fp32")
    with tempfile.TemporaryDirectory(prefix="hpo-deployed-") as temporary:
        export_onnx(TrainedModel(network, loader.tokenizer(config), settings), Path(temporary, "onnx"))


def with_deployed_values(
    executor: Executor,
    folder: Path,
    result: TrialResult,
    has_other_workers: Callable[[], bool] = lambda: False,
) -> TrialResult:
    """The result of a trial that has just ended, with the values of the objectives that are of its deployed
    model, measured here: the score on validation with the trial's thresholds, and the median time in ms of a
    prediction of one text.

    `has_other_workers` says whether others run on this host: the latency is recorded as `shared` then. So is
    the CPU that it was measured on.

    A trial that is not complete has its result unchanged. One whose best weights were not kept ends as
    `failed`, one that cannot be exported, or whose logits are not finite in int8, as `incompatible`.
    """
    metrics = [objective.metric for objective in executor.study.objective]
    if result.outcome != Outcome.COMPLETE:
        return result
    started = time.perf_counter()
    outcome, reason, measured = Outcome.COMPLETE, "", {}
    was_shared = has_other_workers()
    try:
        measured = _measured(executor, folder, result)
        measured["shared"] = was_shared or has_other_workers()
    except HpoError as error:
        outcome = Outcome.INCOMPATIBLE if isinstance(error, ModelError) else Outcome.FAILED
        reason = f"no value of the deployed model: {error}"
    told = {"deployed_int8": measured, "deploy_seconds": time.perf_counter() - started}
    values = None
    if outcome == Outcome.COMPLETE:
        of_deployed = {DEPLOYED_SCORE: measured["score"], DEPLOYED_LATENCY: measured["p50_ms"]}
        values = tuple(
            of_deployed.get(name, value) for name, value in zip(metrics, result.values or (), strict=True)
        )
    telemetry = {**result.telemetry, **told}
    return replace(result, outcome=outcome, reason=reason, values=values, telemetry=telemetry)


def _measured(executor: Executor, folder: Path, result: TrialResult) -> dict[str, Any]:
    """Score, metrics and latency. Raises ModelError where a logit is not finite."""
    artifact, examples = OBJECTIVES_ARTIFACT, executor.dataset.splits["validation"]
    with tempfile.TemporaryDirectory(prefix="hpo-deployed-") as temporary:
        source = TrialSource(None, {}, result.telemetry)
        exported = export_checkpoint(executor, folder, Path(temporary, "export"), source, score_test=False)
        trusted = executor.study.model.trust_remote_code
        model = Workshop(exported, Path(temporary, "artifacts"), (), "cpu", trusted=trusted).load(artifact)
        cache = executor.loader.cache_dir
        windowing = model.settings.windowing
        said = answers(
            model, load_tokenized(executor.dataset, "validation", model.tokenizer, windowing, cache)
        )
        if said is None:
            raise ModelError("its logits are not finite in int8.")
        metrics = said.predicted.metrics()
        with batches_untold():
            seconds = time_in_turn({artifact.name: model.predict}, rows_of(examples), 1, EFFORT)[
                artifact.name
            ]
    latency, cpu = timing(seconds, seconds), probe_device("cpu")
    return {
        "score": objective_value("score", metrics, executor.tasks, {}),
        "metrics": metrics,
        "p50_ms": latency.p50_ms,
        "p99_ms": latency.p99_ms,
        "num_calls": latency.num_calls,
        "num_threads": torch.get_num_threads(),
        "cpu": cpu.name,
        "cpu_features": sorted(cpu.cpu_features),
    }
