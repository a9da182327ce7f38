"""Deploy the best model of a study: write its fastest form that is as good as fp32 to a folder."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpo.api.models import checkpoint_of
from hpo.api.opening import RUNS, check_positive
from hpo.compare.comparison_study import unlabelled_test_tasks
from hpo.compare.planning import ranked_trials
from hpo.config.study_config import StudyConfig
from hpo.data.dataset import DataSet
from hpo.deploy.artifacts import NAMES, parse_names
from hpo.deploy.deployment import DeploymentRequest, DeployTarget, deploy
from hpo.deploy.result import Deployment
from hpo.deploy.timing import BATCH_SIZES
from hpo.device import limit_threads, probe_device
from hpo.errors import InputError, Preempted, RunError
from hpo.evaluation.contributions import unit_of
from hpo.models.export import new_folder
from hpo.study.reading.study_record import StudyRecord, TrialRecord, best_trials, nearest_message
from hpo.study.running.stopping import Stop
from hpo.study.store.storage import Storage
from hpo.trial.best_model import export_checkpoint
from hpo.trial.objectives import quality_objective
from hpo.trial.telemetry import StoredTrial

MODEL, ARTIFACTS, EXPORT = "model", "artifacts", "export"
"""Subfolders of a deployment; only the first remains."""


@dataclass(frozen=True)
class DeploymentOptions:
    """Options of `hpo deploy`, see its help. None: the default."""

    timeout: float = 1800.0
    max_drop: float | None = None
    batch: int = 1
    threads: int | None = None
    artifacts: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_positive(timeout=self.timeout, max_drop=self.max_drop, threads=self.threads)


class DeploymentStopped(RunError):
    """The search was interrupted before fp32 was scored: nothing is kept."""

    exit_code = 130


def deploy_best(
    database: Storage,
    record: StudyRecord,
    config_of: Callable[[StudyRecord], StudyConfig],
    options: DeploymentOptions,
    stop: Stop,
    folder: Path,
) -> dict[str, Any]:
    """Find the form of the best model and write it to `folder`, with deploy.json.

    Returns the content of deploy.json. Raises RunError if no trial is complete or has weights.
    """
    trial = best_model_of(record)
    study = config_of(record), database
    with new_folder(folder, "deploy.json") as staging:
        stored = _deploy(study, trial, options, stop, staging).as_json()
        _finish(stored, staging)
    return stored


def best_model_of(record: StudyRecord) -> TrialRecord:
    """Return the best trial by the first objective about the model. Raises RunError if there is none."""
    ranked = ranked_trials(record)
    if not ranked:
        none_yet = f"the study {record.name} has no complete trial yet, so there is no model to deploy."
        raise RunError(nearest_message(record) or none_yet)
    return best_trials(record)[0] if len(record.metric_names) == 1 else ranked[0]


def _request(config: StudyConfig, data: DataSet, options: DeploymentOptions, stop: Stop) -> DeploymentRequest:
    """Turn the options into a request. Raises InputError if the study's data do not allow it."""
    batch, max_drop = options.batch, options.max_drop
    if batch not in BATCH_SIZES:
        raise InputError(f"--batch must be {' or '.join(map(str, BATCH_SIZES))}, but got {batch}.")
    names = parse_names(options.artifacts) if options.artifacts else NAMES
    metric = quality_objective(config.objective).metric
    if max_drop is None and unit_of(metric) != "points":
        raise InputError(f"--max-drop must be given: {metric} is in {unit_of(metric)}, no default fits.")
    has_test = "test" in data.splits and not unlabelled_test_tasks(config, data)
    max_drop = 1.0 if max_drop is None else max_drop
    return DeploymentRequest(names, max_drop, batch, has_test, stop_reason=partial(_reason_to_end, stop))


def _reason_to_end(stop: Stop) -> str:
    if stop.is_set():
        return "the search was interrupted"
    return "the time of --timeout was over" if time.monotonic() > stop.deadline else ""


def _deploy(
    study: tuple[StudyConfig, Storage],
    trial: TrialRecord,
    options: DeploymentOptions,
    stop: Stop,
    staging: Path,
) -> Deployment:
    """Export the trial and compare the forms of its model, all in folders of `staging`.

    Raises RunError if it has no weights or time runs out before fp32 is scored, DeploymentStopped if stopped.
    """
    device = probe_device(options.device)
    executor, checkpoint = checkpoint_of(*study, trial, device=options.device)
    request = _request(study[0], executor.dataset, options, stop)
    limit_threads(probe_device("cpu"))
    torch.set_num_threads(options.threads or torch.get_num_threads())
    source = StoredTrial(trial.number, trial.params, trial.telemetry)
    exported = export_checkpoint(executor, checkpoint, staging / EXPORT, source, merge=True)
    target = DeployTarget(device, staging / ARTIFACTS, RUNS / "cache" / "tokens")
    stop.can_checkpoint = True  # from here on, an interrupt keeps the scored forms
    try:
        return deploy(study[0], executor.dataset, exported, request, target)
    except Preempted as error:
        if stop.is_set():
            raise DeploymentStopped("Interrupted before fp32 was scored: nothing is kept.") from None
        raise RunError(f"fp32 was {error} Give it longer.") from None


def _finish(stored: Mapping[str, Any], staging: Path) -> None:
    """Write the numbers and keep the chosen form."""
    shutil.rmtree(staging / EXPORT)
    chosen = staging / ARTIFACTS / stored["artifacts"][stored["chosen"]]["artifact"]
    chosen.rename(staging / MODEL)
    shutil.rmtree(staging / ARTIFACTS)
    (staging / "deploy.json").write_text(json.dumps(stored, indent=2) + "\n")
