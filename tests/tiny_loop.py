"""What the training loop is given, made as the executor makes it, without its checks and records."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tiny import CPU, EMULATED
from torch import Tensor

from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.device import DeviceInfo
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.training.evaluate import Evaluation
from hpo.training.loop import TrainingClock, TrainingData, TrainState, train
from hpo.training.losses import MultitaskLoss
from hpo.training.throughput import ThroughputMeter
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


class LossRecorder(MixedPrecision):
    """Keeps the loss of every step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.losses: list[float] = []

    def record_step(self, loss: Tensor, gradient_norm: Tensor) -> None:
        self.losses.append(loss.item())
        super().record_step(loss, gradient_norm)


class Trained(NamedTuple):
    losses: list[float]
    evaluation: Evaluation
    state: TrainState
    mixed_precision: MixedPrecision
    model: MultitaskModel


def train_steps(executor: Executor, num_steps: int, amp: AmpConfig = EMULATED, **params: Any) -> Trained:
    """Train so many steps of a trial and evaluate."""
    config = config_of(executor, max_steps=num_steps, **params)
    model, optimizer, loss_fn, data = loop_parts(executor, config)
    recorder = LossRecorder(PRECISIONS[config.fp_precision], amp, CPU)
    clock = TrainingClock(TrainState(), ThroughputMeter(CPU))
    args = executor.training_args(config)
    (evaluation,) = train(model, optimizer, loss_fn, recorder, data, args, clock)
    return Trained(recorder.losses, evaluation, clock.state, recorder, model)
