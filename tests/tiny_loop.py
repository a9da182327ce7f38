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
from hpo.precision.table import PRECISIONS, AmpConfig, Resolution
from hpo.training.evaluate import Evaluation
from hpo.training.loop import Learner, TrainingData, train
from hpo.training.losses import MultitaskLoss
from hpo.training.progress import TrainingClock, TrainState
from hpo.training.throughput import ThroughputMeter
from hpo.trial.executor import Executor
from hpo.trial.trial_parts import assemble, training_args


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
    name = config.fp_precision
    parts = assemble(executor.study, config, Resolution(name, name, "native"), executor.loader)
    return LoopParts(parts.model, parts.prepare(), parts.loss_fn, parts.data)


class LossRecorder(MixedPrecision):
    """Keeps the loss of every step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.losses: list[float] = []

    def record_step(self, loss: Tensor, gradient_norm: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return super().record_step(loss, gradient_norm)


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
    args = training_args(executor.study, config, data.train.num_windows)
    (evaluation,) = train(Learner(model, loss_fn, recorder), optimizer, data, args, clock)
    return Trained(recorder.losses, evaluation, clock.state, recorder, model)
