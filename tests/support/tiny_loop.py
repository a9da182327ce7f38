"""What the training loop is given, made as the executor makes it, without its checks and records."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpo.config.sections import EvaluationConfig
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS, AmpConfig, Resolution
from hpo.training.budget import Budget, TrainState
from hpo.training.evaluate import Evaluation
from hpo.training.loop import Learner, accumulate_gradients, train
from hpo.training.losses import MultitaskLoss
from hpo.training.throughput import ThroughputMeter, TrainingClock
from hpo.training.training_data import TrainingData
from hpo.trial.executor import Executor
from hpo.trial.parts import assemble, training_args
from support.tiny import CPU, EMULATED, tiny_batch, tiny_objective


def config_of(executor: Executor, **params: Any) -> TrialConfig:
    return build_trial_config(executor.study, params, "fp32", executor.amp)


def loop_parts(
    executor: Executor, config: TrialConfig
) -> tuple[MultitaskModel, torch.optim.Optimizer, MultitaskLoss, TrainingData]:
    """Return the model, its optimizer, the loss and the data."""
    name = config.fp_precision
    parts = assemble(executor.study, config, Resolution(name, name, "native"), executor.loader)
    return parts.model, parts.prepare(), parts.loss_fn, parts.data


class LossRecorder(MixedPrecision):
    """Keeps the loss of every step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.losses: list[float] = []

    def record_step(self, loss: Tensor, gradient_norm: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return super().record_step(loss, gradient_norm)


class Trained(NamedTuple):
    evaluations: list[Evaluation]
    state: TrainState
    mixed_precision: LossRecorder
    model: MultitaskModel
    optimizer: torch.optim.Optimizer

    @property
    def losses(self) -> list[float]:
        return self.mixed_precision.losses


def train_for(
    executor: Executor,
    budget: Budget,
    num_evaluations: int = 1,
    amp: AmpConfig = EMULATED,
    clock: TrainingClock | None = None,
    **params: Any,
) -> Trained:
    """The training of a trial, to the end of the budget."""
    config = config_of(executor, **params)
    model, optimizer, loss_fn, data = loop_parts(executor, config)
    recorder = LossRecorder(PRECISIONS[config.fp_precision], amp, CPU)
    clock = clock or TrainingClock(TrainState(), ThroughputMeter(CPU))
    args = training_args(executor.study, config, data.train.num_windows)
    evaluate_at = EvaluationConfig(per_trial=num_evaluations).shares(None)
    args = replace(args, budget=budget, evaluate_at=evaluate_at)
    evaluations = list(train(Learner(model, loss_fn, recorder), optimizer, data, args, clock))
    return Trained(evaluations, clock.state, recorder, model, optimizer)


def accumulate(
    model: MultitaskModel,
    amp: MixedPrecision,
    micro_batch_size: int = 6,
    loss_fn: MultitaskLoss | None = None,
    seed: int = 0,
) -> Tensor:
    """The loss of the tiny batch, whose gradients the model has."""
    learner = Learner(model, loss_fn or tiny_objective(), amp)
    return accumulate_gradients(learner, tiny_batch(), seed, TrainState(micro_batch_size=micro_batch_size))


def parameter_group(*parameters: nn.Parameter, lr: float = 0.1, weight_decay: float = 0.0) -> dict[str, Any]:
    rates = {"lr": lr, "initial_lr": lr, "weight_decay": weight_decay}
    return {"name": "g", "params": list(parameters), **rates}
