"""What the training loop is given, made as the executor makes it, without its checks and records."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tiny import CPU, EMULATED

from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.device import DeviceInfo
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS
from hpo.training.loop import TrainingData
from hpo.training.losses import MultitaskLoss
from hpo.trial.executor import Executor


class LoopParts(NamedTuple):
    model: MultitaskModel
    optimizer: torch.optim.Optimizer
    loss_fn: MultitaskLoss
    data: TrainingData


def config_of(executor: Executor, **params: Any) -> TrialConfig:
    return build_trial_config(executor.study, params, "fp32", executor.amp)


def amp_of(name: str, device: DeviceInfo = CPU) -> MixedPrecision:
    return MixedPrecision(PRECISIONS[name], EMULATED, device)


def loop_parts(executor: Executor, config: TrialConfig) -> LoopParts:
    train, validation = (executor.tokens(name, config) for name in ("train", "validation"))
    torch.manual_seed(config.seed)
    model = executor.build_model(config)
    loss_fn = executor.loss_fn(config, model, train)
    precision = PRECISIONS[config.fp_precision]
    optimizer = executor.prepare(model, precision, config, executor.used_ids(config))
    return LoopParts(model, optimizer, loss_fn, TrainingData(train, validation, pad_id=0))
