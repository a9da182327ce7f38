"""What is done with the checkpoint of one trial of a study: evaluated in detail, exported, diagnosed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.api.opening import checkpoint_of
from hpo.config.search_space import decode
from hpo.errors import HpoError, InputError, RunError
from hpo.evaluation.detailed import evaluate_predictions
from hpo.models.export import check_export_folder
from hpo.study.reading.detailed_evaluations import store_detailed_evaluation
from hpo.study.reading.study_record import best_trials, nearest_told, with_evaluation
from hpo.trial.best_model import TrialSource, export_checkpoint, split_predictions
from hpo.trial.diagnosis import Diagnosis, StoredTrial, diagnose

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.reading.study_record import StudyRecord, TrialRecord
    from hpo.study.store.storage import Storage
    from hpo.trial.executor import Executor

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Use:
    """What is wanted of the best model of a study."""

    split: str | None = None
    """To evaluate it on in detail."""
    folder: Path | None = None
    """To export it to."""
    merge: bool = False
    """Whether an adapter is added to the weights of the encoder."""
    overwrite: bool = False
    """Whether a model of another study is replaced."""


def use_best(
    database: Storage, record: StudyRecord, config_of: Callable[[StudyRecord], StudyConfig], use: Use
) -> tuple[StudyRecord, dict[str, Any]]:
    """Evaluate and export the best trial; with several objectives the best by the first of them.

    Returns the record with the evaluation, and what was done: `evaluation`, `export`; {} where no trial is
    complete.
    """
    used: dict[str, Any] = {}
    if use.folder is not None:
        _check_export(use.folder, record, overwrite=use.overwrite)
    if not best_trials(record):
        return record, used
    trial = best_trials(record)[0]
    executor, checkpoint = checkpoint_of(config_of(record), database, trial)
    if use.split is not None:
        used["evaluation"] = _evaluate(database, executor, checkpoint, trial, use.split)
        record = with_evaluation(record, trial.number, used["evaluation"]["detailed"])
        trial = next(each for each in record.trials if each.number == trial.number)
    if use.folder is not None:
        source = TrialSource(trial.number, trial.params, trial.telemetry, trial.detailed)
        used["export"] = str(export_checkpoint(executor, checkpoint, use.folder, source, merge=use.merge))
    return record, used


def _evaluate(
    database: Storage, executor: Executor, folder: Path, trial: TrialRecord, split: str
) -> dict[str, Any]:
    """Evaluate the checkpoint of a trial in detail, and store that."""
    name = executor.study.name
    token = database.study_token(name)
    predicted = split_predictions(executor, folder, trial.params, split)
    metrics, document = predicted.metrics(), evaluate_predictions(predicted, split_name=split).as_json()
    try:
        store_detailed_evaluation(database, name, token, trial.number, document)
    except HpoError as error:  # also of a user who may only read
        _logger.warning("The evaluation is not stored: %s", error)
    return {"trial": trial.number, "split": split, "metrics": metrics, "detailed": document}


def _check_export(folder: Path, record: StudyRecord, *, overwrite: bool) -> None:
    """Raise ModelError where `folder` can take no model, InputError where it has that of another study, and
    RunError where no complete trial meets the limits of the study."""
    check_export_folder(folder)
    if told := nearest_told(record):
        raise RunError(told)
    metadata = folder / "hpo.json"
    if overwrite or not metadata.exists():
        return
    try:
        other = json.loads(metadata.read_text())["provenance"]["study"]
    except (OSError, ValueError, LookupError, TypeError):
        other = "unknown"
    if other != record.name:
        raise InputError(
            f"{folder} must be free for a model of `{record.name}`, but holds one of the study `{other}`. "
            "Name another folder, or give --overwrite."
        )


def diagnose_checkpoint(
    database: Storage, record: StudyRecord, config_of: Callable[[StudyRecord], StudyConfig], number: int
) -> Diagnosis:
    """Run the batch after the last checkpoint of a trial.

    Raises InputError if the study has no trial with this number.
    """
    chosen = next((each for each in record.trials if each.number == number), None)
    if chosen is None:
        raise InputError(f"Trial {number}: {record.name} has {len(record.trials)}, numbered from 0.")
    config = config_of(record)
    executor, folder = checkpoint_of(config, database, chosen, kind="step")
    params = decode(config.search_space, chosen.params)
    key = f"{database.study_token(config.name)}/{chosen.origin}"
    stored = StoredTrial(number, chosen.outcome, params, chosen.telemetry, folder, key)
    return diagnose(executor, stored)
