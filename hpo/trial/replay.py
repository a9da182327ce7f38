"""A trial's training run again: to the first step that is not finite, or on from there with other settings.

The batches and dropout masks of a step follow from the seed and the step's number, so the same steps are
made again, by the same loop. It runs eagerly and without the fp32 fallback, keeps its states in memory, and
reads the study's checkpoints without touching them.

A step is bad where its loss is not finite, or its gradients are not and no smaller loss scale is left: as
long as there is one, the scaler skips the step, which is as it should be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hpo.config.trial_config import TrialConfig
from hpo.data.batches import Batch, collate, evaluation_batches, training_batches
from hpo.errors import Nonfinite
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags
from hpo.precision.table import PRECISIONS, Resolution
from hpo.random_numbers import manual_seed
from hpo.training.checkpoint import intact_checkpoints
from hpo.training.loop import TrainingClock, TrainingData, TrainState, train
from hpo.training.losses import MultitaskLoss
from hpo.training.step_seed import step_seed
from hpo.training.throughput import ThroughputMeter
from hpo.trial.executor import Executor
from hpo.trial.nonfinite import is_finite
from hpo.trial.tracing import Origin, trace_origins

MAX_SKIPPED = 24
"""Steps beyond its end that a run makes for updates, while the scaler skips: 16 halve its default to 1."""
SNAPSHOT_EVERY = 3
"""Steps; the older of two is of 3 to 5 steps before the step that is being made, or the beginning."""


@dataclass(frozen=True)
class Snapshot:
    """All that a training goes on from."""

    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    mixed_precision: Mapping[str, Any]
    progress: Mapping[str, Any]
    precision: str


@dataclass(frozen=True)
class BadStep:
    """Where a training stopped being finite."""

    step: int
    """1 for the first."""
    what: str
    """`loss`, `gradients`, or `logits` in an evaluation after the step."""
    scale: float | None
    """The loss scale of the step; None where there is none."""


_RATES = ("lr", "initial_lr")
"""Of a group of weights: they are those of the configuration, not of what it goes on from."""


class _Stopped(Exception):
    """Leaves the training loop."""

    def __init__(self, bad: BadStep | None) -> None:
        self.bad = bad


class _WatchedPrecision(MixedPrecision):
    """Stops at a step that is bad, before it changes a weight; counts those that the scaler does not skip."""

    num_updates = 0

    def record_step(self, loss: Tensor, gradient_norm: Tensor) -> None:
        scale = float(self.scale_value())
        is_last_scale = not self.precision.loss_scaling or scale <= self.config.min_scale
        what = "loss" if not is_finite(loss) else "gradients"
        if what == "loss" or (is_last_scale and not is_finite(gradient_norm)):
            raise _Stopped(BadStep(0, what, scale if self.precision.loss_scaling else None))
        self.num_updates += is_finite(gradient_norm)
        super().record_step(loss, gradient_norm)


class Replay:
    """The training of a trial of `config`, from its first step or from `start`.

    With `own_scale` the loss scale begins as `config` says, and not as in `start`.
    """

    def __init__(
        self,
        executor: Executor,
        config: TrialConfig,
        resolution: Resolution,
        start: Snapshot | None = None,
        *,
        own_scale: bool = False,
    ) -> None:
        amp = config.amp.model_copy(update={"fallback_to_fp32": False})
        self.config = config.model_copy(update={"compile": "none", "amp": amp})
        self.executor = executor
        self.resolution = resolution
        self.parts = executor.parts(self.config, resolution)
        self.model: MultitaskModel = self.parts.model
        used_ids = executor.used_ids(self.config)
        self.optimizer = executor.prepare(self.model, resolution.precision, self.config, used_ids)
        self.mixed_precision = _WatchedPrecision(resolution.precision, amp, executor.device)
        self.state = TrainState()
        self.snapshots: list[Snapshot | None] = [start]
        """The last two states; None is the beginning."""
        if start is not None:
            self._load(start, own_scale)

    def _load(self, start: Snapshot, own_scale: bool) -> None:
        self.model.load_state_dict(start.weights)
        # Weights of another precision have another optimiser, which begins anew.
        if PRECISIONS[start.precision].weights == self.resolution.precision.weights:
            own = [{name: group[name] for name in _RATES} for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(copy.deepcopy(dict(start.optimizer)))
            for group, rates in zip(self.optimizer.param_groups, own, strict=True):
                group.update(rates)
        if start.precision == self.resolution.effective and not own_scale:
            self.mixed_precision.load_state_dict(start.mixed_precision)
        self.state.load_state_dict(start.progress)

    def run(self, until: int, *, num_updates: int = 0, evaluates: bool = False) -> BadStep | None:
        """Train to the first bad step, or until `until` steps are made, or the trial's budget is used up.

        With `num_updates` so many of the steps must also update the weights, within `MAX_SKIPPED` steps more.
        At a bad step the model is as before that step. `evaluates` also makes the trial's evaluations.
        """
        updated = self.mixed_precision.num_updates + num_updates

        def on_step() -> bool:
            is_enough = self.mixed_precision.num_updates >= updated or self.state.step >= until + MAX_SKIPPED
            if is_enough and self.state.step >= until:
                raise _Stopped(None)
            if self.state.step % SNAPSHOT_EVERY == 0:
                self.snapshots = [*self.snapshots[-1:], self._snapshot()]
            return True

        parts, args = self.parts, self.executor.training_args(self.config)
        clock = TrainingClock(self.state, ThroughputMeter(self.executor.device))
        data = TrainingData(parts.train_split, parts.validation_split, parts.pad_id)
        if not evaluates:  # none is due
            self.state.num_evaluations = args.num_evaluations
        try:
            with backend_flags(self.resolution.precision, self.config.amp):
                for _ in train(
                    self.model,
                    self.optimizer,
                    parts.loss_fn,
                    self.mixed_precision,
                    data,
                    args,
                    clock,
                    on_step,
                ):
                    pass
        except _Stopped as stopped:
            bad = stopped.bad
            return bad and BadStep(self.state.step + 1, bad.what, bad.scale)
        except Nonfinite:
            return BadStep(self.state.step, "logits", None)
        return None

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            self.state.step,
            copy.deepcopy(self.model.state_dict()),
            copy.deepcopy(self.optimizer.state_dict()),
            self.mixed_precision.state_dict(),
            self.state.state_dict(),
            self.resolution.effective,
        )

    def origin(self, bad: BadStep) -> Origin | None:
        """The operator that `bad`, at which `run` has stopped, goes back to.

        None where each gradient is finite, and only their norm is not.
        """
        amp, seed = self.mixed_precision, step_seed(self.config.seed, self.state.step)
        with backend_flags(self.resolution.precision, self.config.amp):
            if bad.what == "logits":
                return self._origin_in_evaluation()
            manual_seed(seed)
            batch = self._step_batch()
            self.model.train()
            items = self.parts.loss_fn.count(batch)
            for part in self.executor.ranks.micro_batches(batch, self.state.micro_batch_size):
                if (origin := trace_batch(self.model, self.parts.loss_fn, part, items, amp)) is not None:
                    return origin
        return None

    def _step_batch(self) -> Batch:
        split, config = self.parts.train_split, self.config
        batches = training_batches(split.lengths_W, config.batch_size, config.seed, self.state.epoch)
        return collate(split, batches[self.state.batch], self.parts.loss_fn.tasks, self.parts.pad_id)

    def _origin_in_evaluation(self) -> Origin | None:
        split, device = self.parts.validation_split, self.executor.device.torch_device
        self.model.eval()
        for windows in evaluation_batches(split.lengths_W, self.executor.study.evaluation.batch_tokens):
            batch = collate(split, windows, (), self.parts.pad_id).to(device)
            with trace_origins(self.model) as tracer, self.mixed_precision.evaluation():
                logits = self.model(batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL)
            for values in logits.values():
                if not is_finite(values):
                    return tracer.origin(values)
        return None


def trace_batch(
    model: MultitaskModel,
    loss_fn: MultitaskLoss,
    batch: Batch,
    global_items: Mapping[str, int],
    mixed_precision: MixedPrecision,
) -> Origin | None:
    """The operator that the loss of a (micro-)batch goes back to if it is not finite, or else its gradients.

    Of the gradients those that the backward pass comes to first: from the heads to the embeddings.
    """
    items = loss_fn.count(batch)
    model.zero_grad(set_to_none=True)
    try:
        with trace_origins(model) as tracer:
            with mixed_precision.autocast():
                loss = loss_fn(model, batch.to(mixed_precision.device.torch_device), items, global_items)
            if not is_finite(loss):
                return tracer.origin(loss)
            mixed_precision.scaler.scale(loss).backward()
        for parameter in reversed(list(model.parameters())):
            if parameter.grad is not None and not is_finite(parameter.grad):
                return tracer.origin(parameter.grad)
        return None
    finally:
        model.zero_grad(set_to_none=True)


def stored_snapshot(folder: Path, resume_key: str, precision: str, before: int) -> Snapshot | None:
    """The newest checkpoint of a trial whose weights are finite, of a step before `before`; None: none."""
    for found in intact_checkpoints(folder, "step"):
        step = int(found.state["progress"]["step"])
        if found.resume_key == resume_key and step < before and all(map(is_finite, _floats(found.weights))):
            state = found.state
            return Snapshot(
                step,
                found.weights,
                state["optimizer"],
                state["mixed_precision"],
                state["progress"],
                precision,
            )
    return None


def _floats(weights: Mapping[str, Tensor]) -> Iterator[Tensor]:
    return (value for value in weights.values() if value.is_floating_point())
