"""The objectives `deployed_int8/...`: what a trial's best weights are worth in ONNX int8 on a CPU."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpo.config.study_config import DEPLOYED_LATENCY, DEPLOYED_SCORE
from hpo.data.token_cache import load_tokenized
from hpo.deploy.artifacts import ARTIFACTS, Artifact
from hpo.deploy.making import Workshop
from hpo.deploy.scoring import answers
from hpo.deploy.timing import Effort, batches_untold, rows_of, time_in_turn, timing
from hpo.errors import HpoError
from hpo.outcome import Outcome
from hpo.training.metrics import score
from hpo.trial.best_model import export_checkpoint
from hpo.trial.executor import Executor
from hpo.trial.objectives import objective_value
from hpo.trial.provenance import TrialSource
from hpo.trial.telemetry import TrialResult

EFFORT = Effort(rounds=5, seconds=20.0)


def deployed_artifact() -> Artifact:
    """The artifact that the objectives are of."""
    return next(one for one in ARTIFACTS if one.name == "onnx_int8_dynamic_per_channel")


def with_deployed_values(executor: Executor, folder: Path, result: TrialResult) -> TrialResult:
    """The result of a trial that has just ended, with the values of the objectives that are of its deployed
    model, measured here: the score on validation with the trial's thresholds, and the median time in ms of a
    prediction of one text.

    A trial that is not complete has its result unchanged. One whose best weights were not kept, or cannot be
    exported, ends as `failed`, one whose logits are not finite in int8 as `nonfinite`.
    """
    metrics = [objective.metric for objective in executor.study.objective]
    if result.outcome != Outcome.COMPLETE:
        return result
    started = time.perf_counter()
    outcome, reason, measured = Outcome.COMPLETE, "", {}
    try:
        measured = _measured(executor, folder, result)
    except HpoError as error:
        outcome, reason = Outcome.FAILED, f"no value of the deployed model: {error}"
    if outcome == Outcome.COMPLETE and not measured:
        outcome, reason = Outcome.NONFINITE, "the logits of the deployed model are not finite in int8."
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
    """Score, metrics and latency; empty where a logit is not finite."""
    artifact, examples = deployed_artifact(), executor.dataset.splits["validation"]
    with tempfile.TemporaryDirectory(prefix="hpo-deployed-") as temporary:
        source = TrialSource(None, {}, result.telemetry)
        exported = export_checkpoint(executor, folder, Path(temporary, "export"), source, score_test=False)
        trusted = executor.study.model.trust_remote_code
        model = Workshop(exported, Path(temporary, "artifacts"), (), "cpu", trusted=trusted).load(artifact)
        cache = executor.runs_dir / "cache" / "tokens"
        windowing = model.settings.windowing
        said = answers(
            model, load_tokenized(executor.dataset, "validation", model.tokenizer, windowing, cache)
        )
        if said is None:
            return {}
        metrics = {
            task.name: score(task, said.predicted.predictions[task.name], examples) for task in model.tasks
        }
        with batches_untold():
            seconds = time_in_turn({0: model.predict}, rows_of(examples), 1, EFFORT)[0]
    latency = timing(seconds, seconds)
    return {
        "score": objective_value("score", metrics, executor.tasks, {}),
        "metrics": metrics,
        "p50_ms": latency.p50_ms,
        "p99_ms": latency.p99_ms,
        "num_calls": latency.num_calls,
        "num_threads": torch.get_num_threads(),
    }
