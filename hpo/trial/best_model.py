"""The model that a trial left behind: its best checkpoint, scored on a split or exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpo.config.study_config import StudyConfig
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.errors import DataError, RunError, did_you_mean
from hpo.models.export import export_model
from hpo.models.model_parts import set_float32_parts
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.table import PRECISIONS, Precision, resolve
from hpo.training.checkpoint import best_checkpoint
from hpo.training.decoding import DecodingThresholds
from hpo.training.evaluate import evaluate
from hpo.trial.executor import Executor
from hpo.trial.telemetry import ScoredEvaluation, TrialResult


def score_checkpoint(executor: Executor, folder: Path, split: str) -> dict[str, dict[str, float]]:
    """{task: {metric: value}} of a trial's best checkpoint, with the decisions chosen on validation.

    Scored under the trial's precision. Raises RunError when the checkpoint is gone or damaged, DataError when
    there is no such split, Unsupported when this device cannot run the precision.
    """
    splits = executor.dataset.splits
    if split not in splits:
        raise DataError(f"there is no split {split!r}.{did_you_mean(split, list(splits))}")
    model, config, precision, decisions = _best_model(executor, folder)
    resolve(precision.name, executor.device, config.amp.model_copy(update={"on_unsupported": "prune"}))
    with backend_flags(precision, config.amp):
        metrics, _ = evaluate(
            model,
            executor.tokens(split, config),
            executor.tasks,
            MixedPrecision(precision, config.amp, executor.device),
            executor.study.evaluation.batch_tokens,
            executor.pad_id(config),
            decisions,
        )
    return metrics


def with_test_metrics(executor: Executor, folder: Path, result: TrialResult) -> TrialResult:
    """The result of a trial that has just ended, with the metrics of its best weights on the test split.

    A trial whose best weights were not kept ends as `failed`, to be tried again.
    """
    if result.outcome != Outcome.COMPLETE:
        return result
    try:
        metrics = score_checkpoint(executor, folder, "test")
    except RunError as error:
        return replace(result, outcome=Outcome.FAILED, reason=f"no score on test: {error}", values=None)
    return replace(result, telemetry={**result.telemetry, "test_metrics": metrics})


def export_checkpoint(executor: Executor, folder: Path, out_dir: Path) -> Path:
    """Write a trial's best checkpoint as a folder that transformers and this package load.

    Raises RunError when the checkpoint is gone or damaged, ModelError when `out_dir` is not free.
    """
    model, config, precision, decisions = _best_model(executor, folder)
    return export_model(
        model,
        executor.tokenizer(config),
        out_dir,
        max_length=config.max_length,
        attention=config.attention,
        precision=precision.name,
        float32_parts=config.float32_parts,
        decisions=decisions,
    )


def _best_model(
    executor: Executor, folder: Path
) -> tuple[MultitaskModel, TrialConfig, Precision, dict[str, DecodingThresholds]]:
    best = best_checkpoint(folder)
    if best is None:
        raise RunError(
            f"there is no intact checkpoint of the best evaluation in {folder}. It is written where the "
            "trial ran, or at checkpoint.location, and checkpoint.top_k says how many trials keep theirs."
        )
    config = TrialConfig.model_validate_json(best.state["config"])
    _check_encoder(executor.study, config)
    precision = PRECISIONS[best.state["precision"]]
    model = executor.build_model(config)
    set_float32_parts(model, None, config.float32_parts)
    prepare_model(model, precision)
    model.load_state_dict(best.weights)
    decisions = ScoredEvaluation.from_state_dict(best.state["best"]).evaluation.decisions
    return model, config, precision, decisions


def _check_encoder(study: StudyConfig, config: TrialConfig) -> None:
    """Refuse a checkpoint from elsewhere that names an encoder of its own, whose code would run."""
    choices = getattr(study.search_space.get("encoder"), "choices", None)
    possible = [{"encoder": choice} for choice in choices] if choices else [{}]
    if config.encoder not in [build_trial_config(study, params, "fp32").encoder for params in possible]:
        raise RunError(
            f"the encoder must be one of the study's, but the checkpoint names {config.encoder!r}. It is of "
            "another study, or was changed."
        )
