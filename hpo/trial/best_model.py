"""The model that a trial left behind: its best checkpoint, evaluated on a split or exported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from hpo.config.study_config import StudyConfig
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.data.batches import evaluation_batches
from hpo.errors import DataError, RunError, did_you_mean
from hpo.evaluation.detailed import SplitPredictions, predict_split
from hpo.models.encoder import attention_on
from hpo.models.export import ExportSettings, export_model
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.table import PRECISIONS, Precision, resolve
from hpo.training.checkpoint import best_checkpoint
from hpo.training.evaluate import Evaluation, check_finite, predict_logits
from hpo.training.metrics import RowStatistics
from hpo.trial.executor import Executor
from hpo.trial.provenance import TrialSource, provenance
from hpo.trial.telemetry import ScoredEvaluation, TrialResult

_BestModel = tuple[MultitaskModel, TrialConfig, Precision, Evaluation]


def split_predictions(
    executor: Executor, folder: Path, split: str, on_batch: Callable[[], None] = lambda: None
) -> SplitPredictions:
    """What a trial's best checkpoint says of a split, under the trial's precision and with its thresholds.

    `on_batch` runs before each batch; what it raises ends this. Raises RunError when the checkpoint is gone
    or damaged, DataError when there is no such split, Unsupported when this device cannot run the precision,
    Nonfinite when its logits are not finite.
    """
    splits = executor.dataset.splits
    if split not in splits:
        raise DataError(f"there is no split {split!r}.{did_you_mean(split, list(splits))}")
    model, config, precision, evaluation = _best_model(executor, folder)
    resolve(precision.name, executor.device, config.amp.model_copy(update={"on_unsupported": "prune"}))
    tokens = executor.loader.tokens(split, config)
    with backend_flags(precision, config.amp):
        logits = predict_logits(
            model,
            tokens,
            evaluation_batches(tokens.lengths_W, executor.study.evaluation.batch_tokens),
            MixedPrecision(precision, config.amp, executor.device),
            executor.loader.pad_id(config),
            on_batch,
        )
    check_finite(logits)
    return predict_split(executor.tasks, logits, tokens, evaluation.decisions)


def with_scores(
    executor: Executor, folder: Path, result: TrialResult, split: str
) -> tuple[TrialResult, Mapping[str, RowStatistics]]:
    """The result of a trial that has just ended, and what each row of a split says of its best weights.

    Of test, the metrics are in the result too. A trial whose best weights were not kept ends as `failed`, to
    be tried again; of one that is not complete there is nothing.
    """
    if result.outcome != Outcome.COMPLETE:
        return result, {}
    try:
        predicted = split_predictions(executor, folder, split)
    except RunError as error:
        return replace(
            result, outcome=Outcome.FAILED, reason=f"no score on {split}: {error}", values=None
        ), {}
    if split == "test":
        result = replace(result, telemetry={**result.telemetry, "test_metrics": predicted.metrics()})
    return result, predicted.statistics


def export_checkpoint(executor: Executor, folder: Path, out_dir: Path, trial: TrialSource) -> Path:
    """Write a trial's best checkpoint as a folder that transformers and this package load.

    Raises RunError when the checkpoint is gone or damaged, ModelError when `out_dir` is not free.
    """
    model, config, precision, evaluation = _best_model(executor, folder)
    # Weights that could not be written leave those of an older evaluation.
    trial = replace(trial, telemetry={**trial.telemetry, "metrics": evaluation.metrics})
    data = executor.study.data
    settings = ExportSettings(
        windowing=executor.loader.windowing(config),
        attention=config.attention,
        precision=precision.name,
        tf32=bool(config.amp.tf32),
        batch_tokens=executor.study.evaluation.batch_tokens,
        columns=data.columns.model_dump(include={"id", "text"}),
        csv=data.csv.model_dump(),
        decisions=evaluation.decisions,
        provenance=provenance(executor, config, trial),
    )
    return export_model(model, executor.loader.tokenizer(config), out_dir, settings)


_FORMER_SETTINGS = {"precision_overrides": {}, "weight_rounding": "nearest"}
"""Of earlier versions, with the defaults under which a checkpoint means the same now."""


def _best_model(executor: Executor, folder: Path) -> _BestModel:
    best = best_checkpoint(folder)
    if best is None:
        raise RunError(
            f"there is no intact checkpoint of the best evaluation in {folder}. It is written where the "
            "trial ran, or at checkpoint.location, and checkpoint.top_k says how many trials keep theirs."
        )
    config = stored_config(folder, best.state["config"])
    _check_encoder(executor.study, config)
    precision = PRECISIONS[best.state["precision"]]
    runnable = attention_on(executor.device.type, config.attention)
    model = executor.loader.build_model(config.model_copy(update={"attention": runnable}))
    prepare_model(model, precision)
    model.load_state_dict(best.weights)
    return model, config, precision, ScoredEvaluation.from_state_dict(best.state["best"]).evaluation


def stored_config(folder: Path, content: str) -> TrialConfig:
    """The settings that a checkpoint in `folder` has as JSON. Raises RunError for one of another version."""
    settings = json.loads(content)
    for name, default in _FORMER_SETTINGS.items():
        if settings.get(name) == default:
            del settings[name]
    try:
        return TrialConfig.model_validate(settings)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise RunError(
            f"the best checkpoint in {folder} is of another version of hpo: {where}: {problem['msg']}"
        ) from error


def _check_encoder(study: StudyConfig, config: TrialConfig) -> None:
    """Refuse a checkpoint from elsewhere that names another encoder, whose code would run."""
    choices = getattr(study.search_space.get("encoder"), "choices", None)
    possible = [{"encoder": choice} for choice in choices] if choices else [{}]
    if config.encoder not in [build_trial_config(study, params, "fp32").encoder for params in possible]:
        raise RunError(
            f"the encoder must be one of the study's, but the checkpoint names {config.encoder!r}. It is of "
            "another study, or was changed."
        )
