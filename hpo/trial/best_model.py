"""The model of a finished trial: its best checkpoint, evaluated on a split, or exported."""

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import hpo
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.data.batches import evaluation_batches
from hpo.errors import CodeError, DataError, RunError, TrialEnd
from hpo.evaluation.detailed import SplitPredictions, predict_split
from hpo.json_safe import json_safe
from hpo.models.adapters import base_digest, has_adapter, load_trained, merge_adapter
from hpo.models.encoder import attention_of, attention_on
from hpo.models.export import BaseModel, ExportSettings, export_model
from hpo.models.hub import hub_id
from hpo.models.model_parts import set_float32_parts
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome, TrialResult
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.table import PRECISIONS, Precision, resolve
from hpo.random_numbers import manual_seed
from hpo.training.checkpoint import best_checkpoint
from hpo.training.evaluate import Evaluation, check_finite, predict_logits
from hpo.training.metrics import RowStatistics
from hpo.trial.executor import Executor
from hpo.trial.telemetry import StoredTrial
from hpo.versions import installed_versions

_BestModel = tuple[MultitaskModel, TrialConfig, Precision, Evaluation, str]


def split_predictions(
    executor: Executor,
    folder: Path,
    params: Mapping[str, Any],
    split: str,
    on_batch: Callable[[float], None] = lambda _: None,
) -> SplitPredictions:
    """Predict a split with a trial's best checkpoint, in the trial's precision and with its thresholds.

    `folder` and `params` are the trial's. `on_batch`: see `predict_logits`. Raises RunError if the
    checkpoint is gone or damaged, DataError if there is no such split, Unsupported if this device cannot run
    the precision, Nonfinite if the logits are not finite.
    """
    splits = executor.dataset.splits
    if split not in splits:
        raise DataError(
            f"there is no split {split!r}, only {', '.join(splits)}. For a test split, name its file in "
            "`data.files` of a new study, or set `data.test_fraction` there."
        )
    model, config, precision, evaluation, _ = _best_model(executor, folder, params)
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
    executor: Executor, folder: Path, params: Mapping[str, Any], result: TrialResult, split: str
) -> tuple[TrialResult, Mapping[str, RowStatistics]]:
    """Return the result of a finished trial, and the row statistics of its best weights on a split.

    Metrics on test are added to the result. A complete trial ends as `failed`, to be tried again, if its best
    weights were not kept, and as `nonfinite` if its logits are not finite. Other trials have no statistics.
    """
    if result.outcome != Outcome.COMPLETE:
        return result, {}
    try:
        predicted = split_predictions(executor, folder, params, split)
    except (RunError, TrialEnd, CodeError) as error:
        outcome = error.outcome if isinstance(error, TrialEnd) else Outcome.FAILED
        outcome = Outcome.INVALID if isinstance(error, CodeError) else outcome
        return replace(result, outcome=outcome, reason=f"no score on {split}: {error}", values=None), {}
    if split == "test":
        result = replace(result, telemetry={**result.telemetry, "test_metrics": predicted.metrics()})
    return result, predicted.statistics


def export_checkpoint(
    executor: Executor, folder: Path, out_dir: Path, trial: StoredTrial, *, merge: bool = False
) -> Path:
    """Write a trial's best checkpoint as a folder for transformers and this package.

    With `merge` an adapter is added to the weights; else it is written by itself, as in peft. Raises RunError
    if the checkpoint is gone or damaged, ModelError if `out_dir` is not free.
    """
    model, config, precision, evaluation, digest = _best_model(executor, folder, trial.params)
    # Weights that could not be written leave those of an older evaluation.
    trial = replace(trial, telemetry={**trial.telemetry, "metrics": evaluation.metrics})
    data = executor.study.data
    settings = ExportSettings(
        windowing=executor.loader.windowing(config),
        attention=config.attention or "sdpa",
        precision=precision.name,
        fp32_parts=tuple(config.fp32_parts),
        tf32=bool(config.amp.tf32),
        batch_tokens=executor.study.evaluation.batch_tokens,
        columns=data.columns.model_dump(include={"id", "text", "tokens"}),
        csv=data.csv.model_dump(),
        code=executor.study.code,
        decisions=evaluation.decisions,
        provenance=provenance(executor, config, trial),
    )
    tokenizer = executor.loader.tokenizer(config)
    if not has_adapter(model):
        return export_model(model, tokenizer, out_dir, settings)
    if merge:
        merge_adapter(model)
        # The layers of the adapter are gone: a module inside one is the layer itself now.
        parts = dict.fromkeys(re.split(r"\.(?:base_layer|lora_)", name)[0] for name in settings.fp32_parts)
        return export_model(model, tokenizer, out_dir, replace(settings, fp32_parts=tuple(parts)))
    manual_seed(config.seed)  # as in `_best_model`
    has_name = hub_id(config.encoder) is not None
    encoder = None if has_name else executor.loader.build_encoder(config)
    name = str(config.encoder) if has_name else None
    base = BaseModel(name, executor.study.model.revision, digest, precision.frozen)
    return export_model(model, tokenizer, out_dir, replace(settings, base=base), encoder)


def _best_model(executor: Executor, folder: Path, params: Mapping[str, Any]) -> _BestModel:
    best = best_checkpoint(folder)
    if best is None:
        raise RunError(
            f"there is no intact checkpoint of the best evaluation in {folder}. It is written where the "
            "trial ran, or at checkpoint.location, and checkpoint.top_k says how many trials keep theirs."
        )
    try:
        evaluation = Evaluation.from_state_dict(best.state["best"])
        precision, fp32_parts = PRECISIONS[best.state["precision"]], tuple(best.state["fp32_parts"])
    except (KeyError, ValidationError) as error:
        raise RunError(
            f"the checkpoint of the best evaluation in {folder} is of another version of hpo. Train the "
            "trial again, or use the version of its training."
        ) from error
    config = build_trial_config(executor.study, params, precision.name, executor.amp)
    config = config.model_copy(update={"fp32_parts": fp32_parts})
    precision = replace(precision, frozen=config.base_precision)
    runnable = attention_on(executor.device.type, config.attention)
    manual_seed(config.seed)  # frozen weights that are random are those of the trial
    model = executor.loader.build_model(config.model_copy(update={"attention": runnable}))
    config = config.model_copy(update={"attention": config.attention or attention_of(model.encoder)})
    digest = base_digest(model)
    if digest != best.state.get("base_digest", digest):
        raise RunError(
            f"the encoder must have the weights that the trial's adapter in {folder} was trained on, but has "
            "others now. Give it the earlier ones again, or name their `model.revision`."
        )
    set_float32_parts(model, config.fp32_parts)
    prepare_model(model, precision)
    load_trained(model, best.weights)
    return model, config, precision, evaluation, digest


def provenance(executor: Executor, config: TrialConfig, trial: StoredTrial) -> dict[str, Any]:
    """Return the origin of an exported model for its hpo.json: study, trial and data."""
    study = executor.study
    dataset, precision = executor.dataset, trial.telemetry.get("precision", {})
    settings = config.model_dump(mode="json", exclude={"encoder", "amp"}, exclude_none=True)
    scores = {"validation": trial.telemetry.get("metrics"), "test": trial.telemetry.get("test_metrics")}
    for split, document in trial.detailed.items():
        task_scores = {task: of_task["metrics"] for task, of_task in document["tasks"].items()}
        scores[split] = {
            task: {metric: of["value"] for metric, of in metrics.items()}
            for task, metrics in task_scores.items()
        }
    record = {
        "study": study.name,
        "trial": trial.number,
        "parameters": {name: value for name, value in trial.params.items() if name != "encoder"},
        "settings": {name: value for name, value in settings.items() if value not in ({}, [])},
        "scores": {split: task_scores for split, task_scores in scores.items() if task_scores},
        "precision": {
            "requested": config.fp_precision,
            **{key: precision.get(key) for key in ("effective", "support", "observed")},
        },
        "data": {
            "source": study.data.source or [one.source for one in study.data.sources],
            "fingerprint": dataset.fingerprint,
        },
        "encoder": encoder_facts(config.encoder, study.model.revision),
        "device": trial.telemetry.get("device", {}).get("name"),
        "versions": {
            "hpo": hpo.__version__,
            "python": platform.python_version(),
            **installed_versions("torch", "transformers", "tokenizers", "safetensors", "numpy"),
        },
    }
    plain: dict[str, Any] = json_safe(record)
    return plain


def encoder_facts(encoder: str | Mapping[str, Any], revision: str | None) -> dict[str, Any]:
    """Return name and revision of an encoder, without a path of this machine."""
    if not isinstance(encoder, str):
        return {"name": f"a fresh {encoder.get('model_type')}", "hub_id": None}
    hub_name = hub_id(encoder)
    return {"name": hub_name or Path(encoder).name, "hub_id": hub_name, "revision": revision}
