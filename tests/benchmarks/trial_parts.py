"""A trial's parts as the executor puts them together, for programs that drive the loop themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from workload import Workload, study_content

from hpo.config.study_config import load_study
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.device import probe_device
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS
from hpo.training.loop import TrainingData
from hpo.training.losses import MultitaskLoss
from hpo.trial.executor import Executor


@dataclass
class TrialParts:
    """What a training loop needs."""

    config: TrialConfig
    model: MultitaskModel
    optimizer: torch.optim.Optimizer
    loss_fn: MultitaskLoss
    mixed_precision: MixedPrecision
    data: TrainingData


def executor_of(
    data: Path,
    workload: Workload,
    precision: str = "fp32",
    *,
    work: Path | None = None,
    device: str = "cpu",
    **training: Any,
) -> Executor:
    """The executor of the workload's study with these settings of a trial, working in `work` or in `data`."""
    work = work or data
    path = work / "study.yaml"
    path.write_text(yaml.safe_dump(study_content(workload, data, precision, device=device, **training)))
    return Executor(load_study(str(path)), probe_device(device), work / "runs")


def config_of(executor: Executor, seed: int, precision: str = "fp32") -> TrialConfig:
    return build_trial_config(executor.study, {"seed": seed}, precision, executor.amp)


def assemble(
    executor: Executor,
    config: TrialConfig,
    change_weights: Callable[[MultitaskModel], None] | None = None,
) -> TrialParts:
    """The parts of a trial, at its first step. `change_weights` gets the model before its precision."""
    train_split, validation_split = (executor.tokens(name, config) for name in ("train", "validation"))
    torch.manual_seed(config.seed)
    model = executor.build_model(config)
    if change_weights:
        change_weights(model)
    loss_fn = executor.loss_fn(config, model, train_split)
    precision = PRECISIONS[config.fp_precision]
    return TrialParts(
        config,
        model,
        executor.prepare(model, precision, config, executor.used_ids(config)),
        loss_fn,
        MixedPrecision(precision, executor.amp, executor.device),
        TrainingData(train_split, validation_split, executor.pad_id(config)),
    )
