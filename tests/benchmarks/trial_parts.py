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


def executor_of(folder: Path, workload: Workload, precision: str = "fp32", **training: Any) -> Executor:
    """The executor of the workload's study with these settings of a trial."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study_content(workload, folder, precision, **training)))
    return Executor(load_study(str(path)), probe_device("cpu"), folder / "runs")


def config_of(executor: Executor, seed: int, precision: str = "fp32") -> TrialConfig:
    return build_trial_config(executor.study, {"seed": seed}, precision, executor.amp)


def assemble(
    executor: Executor,
    config: TrialConfig,
    *,
    change_weights: Callable[[MultitaskModel], None] = lambda _: None,
    mixed_precision: type[MixedPrecision] = MixedPrecision,
) -> TrialParts:
    """The parts of a trial, at its first step. `change_weights` gets the model before its precision."""
    train_split, validation_split = (executor.tokens(name, config) for name in ("train", "validation"))
    torch.manual_seed(config.seed)
    model = executor.build_model(config)
    change_weights(model)
    loss_fn = executor.loss_fn(config, model, train_split)
    precision = PRECISIONS[config.fp_precision]
    return TrialParts(
        config,
        model,
        executor.prepare(model, precision, config, executor.used_ids(config)),
        loss_fn,
        mixed_precision(precision, executor.amp, executor.device),
        TrainingData(train_split, validation_split, executor.pad_id(config)),
    )
