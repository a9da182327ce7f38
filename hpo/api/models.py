"""Evaluate, export, diagnose or reproduce one trial of a study."""

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from hpo.api.opening import RUNS, make_runs_folder
from hpo.config.resolved_study import resolve_study
from hpo.config.search_space import decode, refusal
from hpo.config.study_config import StudyConfig
from hpo.device import probe_device
from hpo.errors import HpoError, InputError, RunError
from hpo.evaluation.detailed import evaluate_predictions
from hpo.models.export import check_export_folder
from hpo.study.checkpoints.remote_store import open_remote_store
from hpo.study.reading.detailed_evaluations import store_detailed_evaluation
from hpo.study.reading.study_record import (
    StudyRecord,
    TrialRecord,
    best_trials,
    nearest_message,
    with_evaluation,
)
from hpo.study.store.storage import Storage
from hpo.study.store.studies import check_data
from hpo.trial.best_model import export_checkpoint, split_predictions
from hpo.trial.diagnosis import Diagnosis, diagnose
from hpo.trial.executor import Executor
from hpo.trial.reproduction import Reproduction, reproduce
from hpo.trial.telemetry import StoredTrial

_logger = logging.getLogger(__name__)


def use_best(
    database: Storage,
    record: StudyRecord,
    config_of: Callable[[StudyRecord], StudyConfig],
    split: str | None,
    folder: Path | None,
    merge: bool,
) -> tuple[StudyRecord, dict[str, Any]]:
    """Evaluate and export the best trial, see `hpo.Study.use_best`.

    `config_of` may refuse the code of the study, so it is called after the checks of the record.
    """
    used: dict[str, Any] = {}
    if folder is not None:
        check_export_folder(folder, study=record.name)
        if message := nearest_message(record):
            raise RunError(message)
    if not (best := best_trials(record)):
        return record, used
    trial = best[0]
    executor, checkpoint = checkpoint_of(config_of(record), database, trial)
    if split is not None:
        used["evaluation"] = _evaluate(database, executor, checkpoint, trial, split)
        record = with_evaluation(record, trial.number, used["evaluation"]["detailed"])
        trial = next(each for each in record.trials if each.number == trial.number)
    if folder is not None:
        source = StoredTrial(trial.number, trial.params, trial.telemetry, detailed=trial.detailed)
        used["export"] = str(export_checkpoint(executor, checkpoint, folder, source, merge=merge))
    return record, used


def _evaluate(
    database: Storage, executor: Executor, folder: Path, trial: TrialRecord, split: str
) -> dict[str, Any]:
    """Evaluate the checkpoint of a trial in detail, and store the result."""
    name = executor.study.name
    token = database.study_token(name)
    predicted = split_predictions(executor, folder, trial.params, split)
    metrics, document = predicted.metrics(), evaluate_predictions(predicted, split_name=split).as_json()
    try:
        store_detailed_evaluation(database, name, token, trial.number, document)
    except HpoError as error:  # also if the user may only read
        _logger.warning("The evaluation is not stored: %s", error)
    return {"trial": trial.number, "split": split, "metrics": metrics, "detailed": document}


def diagnose_checkpoint(
    database: Storage, record: StudyRecord, config_of: Callable[[StudyRecord], StudyConfig], number: int
) -> Diagnosis:
    """Run the batch after the last checkpoint of a trial.

    Raises InputError if the study has no trial with this number.
    """
    chosen = next((each for each in record.trials if each.number == number), None)
    if chosen is None:
        others = f" {record.num_foreign} more were not made by hpo." if record.num_foreign else ""
        raise InputError(f"Trial {number}: {record.name} has {len(record.trials)}, numbered from 0.{others}")
    config = config_of(record)
    executor, folder = checkpoint_of(config, database, chosen, kind="step")
    params = decode(config.search_space, chosen.params)
    key = f"{database.study_token(config.name)}/{chosen.number}"
    stored = StoredTrial(number, params, chosen.telemetry, chosen.outcome, folder=folder, resume_key=key)
    return diagnose(executor, stored)


def trial_to_reproduce(
    database: Storage, record: StudyRecord, config_of: Callable[[StudyRecord], StudyConfig]
) -> tuple[Executor, StoredTrial]:
    """Return the record of the best trial, and an executor of its study on the same data.

    Raises RunError if no trial is complete, InputError if the data or the code are no longer the same.
    """
    if not (best := best_trials(record)):
        raise RunError(f"The study `{record.name}` has no complete trial.")
    trial = best[0]
    executor = _executor_of(config_of(record), database, trial)
    evaluations = {row.step: row.metrics for row in trial.evaluations}
    return executor, StoredTrial(trial.number, trial.params, trial.telemetry, evaluations=evaluations)


def check_new_folder(folder: str | Path | None) -> None:
    """Raise InputError if the folder has files."""
    if folder is not None and Path(folder).exists() and any(Path(folder).iterdir()):
        raise InputError(f"{folder}: must be a new or an empty folder, but it has files.")


def reproduce_in(folder: str | Path | None, executor: Executor, trial: StoredTrial) -> Reproduction:
    """Train the trial again with its checkpoints in `folder`, or in a temporary one."""
    with TemporaryDirectory(prefix="reproduce-", dir=RUNS / executor.study.name) as temporary:
        return reproduce(executor, trial, Path(folder or temporary))


def _executor_of(
    config: StudyConfig, database: Storage, trial: TrialRecord, device: str | None = None
) -> Executor:
    """Build an executor of the trial's study on the study's data."""
    if problem := refusal(config.search_space, trial.params):
        raise InputError(f"Trial {trial.number} does not belong to the study `{config.name}`: {problem}")
    make_runs_folder(config.name)
    executor = Executor(resolve_study(config, probe_device(device or config.device)), RUNS)
    check_data(database, config.name, executor.dataset.fingerprint)
    return executor


def checkpoint_of(
    config: StudyConfig,
    database: Storage,
    trial: TrialRecord,
    *,
    device: str | None = None,
    kind: Literal["best", "step"] = "best",
) -> tuple[Executor, Path]:
    """Return an executor of the study and the folder with a trial's newest checkpoint of that kind.

    Raises InputError if the study lacks a parameter of the trial.
    """
    executor = _executor_of(config, database, trial, device)
    folder = executor.trial_folder(database.study_token(config.name), trial.number)
    if (remote := open_remote_store(config.checkpoint)) is not None:
        remote.fetch_newest(kind, folder)
    return executor, folder
