"""A trial's training run again: to its first step that is not finite, or on from there with other settings.

Batches and dropout masks of a step follow from the seed and the step's number, so the same loop makes the
same steps again, eagerly and without the fp32 fallback. Its states are kept in memory.

A step is bad where its loss is not finite, or its gradients are not and the loss scale is at its floor:
above that the scaler skips the step, as it should.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpo.data.batches import collate, evaluation_batches, training_batches
from hpo.errors import Nonfinite
from hpo.models.adapters import load_trained, trained_state
from hpo.precision.amp import MixedPrecision, backend_flags
from hpo.precision.table import PRECISIONS
from hpo.training.checkpoint import intact_checkpoints
from hpo.training.evaluate import predict_logits
from hpo.training.loop import Learner, TrainingHooks, accumulate_gradients, train
from hpo.training.progress import ThroughputMeter, TrainingClock, TrainState
from hpo.trial.nonfinite import FirstNonfinite, is_finite
from hpo.trial.trial_parts import TrialParts, training_args

NUM_UPDATES = 3
"""Steps that must update the weights, within `MAX_SKIPPED` more: 16 skipped ones halve the scale to 1."""
MAX_SKIPPED = 24
SNAPSHOT_EVERY = 3
"""Steps; the older of two is of 3 to 5 steps before the step that is being made, or the beginning."""

State = Mapping[str, Any]
"""What a training goes on from: `weights`, `optimizer`, `mixed_precision`, `progress` and `precision`."""
BadStep = tuple[int, str]
"""The step, 1 for the first, and what was not finite: `loss`, `gradients`, or `logits` after it."""


class _Stopped(Exception):
    """Leaves the training loop; with what was not finite."""


class _WatchedPrecision(MixedPrecision):
    """Stops at a step that is bad, before it changes a weight; counts those that the scaler does not skip."""

    num_updates = 0

    def record_step(self, loss: Tensor, gradient_norm: Tensor) -> Tensor:
        is_floor = not self.precision.loss_scaling or float(self.scale_value()) <= self.config.min_scale
        if not is_finite(loss):
            raise _Stopped("loss")
        if is_floor and not is_finite(gradient_norm):
            raise _Stopped("gradients")
        self.num_updates += is_finite(gradient_norm)
        return super().record_step(loss, gradient_norm)


class Replay:
    """The training of a trial of `parts`, from its first step or from `start`."""

    def __init__(self, parts: TrialParts, start: State | None) -> None:
        amp = parts.config.amp.model_copy(update={"fallback_to_fp32": False})
        self.parts = parts
        self.optimizer = parts.prepare()
        self.mixed_precision = _WatchedPrecision(parts.resolution.precision, amp, parts.device)
        self.learner = Learner(parts.model, parts.loss_fn, self.mixed_precision)
        self.state = TrainState()
        self.args = training_args(parts.study, parts.config, parts.data.train.num_windows)
        self.snapshots = [start]
        """The last two states; None is the beginning."""
        if start is not None:
            self._go_on_from(start)

    def _go_on_from(self, start: State) -> None:
        precision, of_start = self.parts.resolution.precision, PRECISIONS[start["precision"]]
        load_trained(self.parts.model, start["weights"])
        if of_start.weights == precision.weights:  # else the optimiser begins anew
            rates = [group["initial_lr"] for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["initial_lr"] = rate  # that of the configuration
        if of_start.name == precision.name:
            self.mixed_precision.load_state_dict(start["mixed_precision"])
        self.state.load_state_dict(start["progress"])

    def run(self, until: int) -> BadStep | None:
        """Train to the first bad step, or until `until` steps are made, or the trial's budget is used up.

        At a bad step the model is as before that step.
        """
        amp, state, data = self.mixed_precision, self.state, self.parts.data

        def on_step() -> bool:
            if state.step >= until + (MAX_SKIPPED if amp.num_updates < NUM_UPDATES else 0):
                raise _Stopped
            if state.step % SNAPSHOT_EVERY == 0:
                self.snapshots = [*self.snapshots[-1:], self._snapshot()]
            return True

        clock = TrainingClock(state, ThroughputMeter(amp.device))
        trained = train(self.learner, self.optimizer, data, self.args, clock, TrainingHooks(on_step))
        try:
            with backend_flags(amp.precision, amp.config):
                for _ in trained:
                    pass
        except _Stopped as stopped:
            return (state.step + 1, *stopped.args) if stopped.args else None
        except Nonfinite:
            return state.step, "logits"
        return None

    def _snapshot(self) -> State:
        return {
            "weights": copy.deepcopy(trained_state(self.parts.model)),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "mixed_precision": self.mixed_precision.state_dict(),
            "progress": self.state.state_dict(),
            "precision": self.parts.resolution.effective,
        }

    def origin(self, what: str) -> str | None:
        """The operator that broke the step at which `run` has stopped, which is run once more."""
        parts, args, amp = self.parts, self.args, self.mixed_precision
        with backend_flags(amp.precision, amp.config), FirstNonfinite() as watched:
            if what == "logits":
                split = parts.data.validation
                batches = evaluation_batches(split.lengths_W, args.evaluation_tokens)
                predict_logits(parts.model, split, batches, amp, parts.data.pad_id)
            else:
                split, tasks = parts.data.train, parts.loss_fn.tasks
                batches = training_batches(split.lengths_W, args.batch_size, args.seed, self.state.epoch)
                batch = collate(split, batches[self.state.batch], tasks, parts.data.pad_id)
                accumulate_gradients(self.learner, batch, args.seed, self.state)
        return watched.operator


def stored_state(folder: Path, resume_key: str, precision: str, before: int) -> State | None:
    """The newest checkpoint of a trial whose weights are finite, of a step before `before`; None: none."""
    for checkpoint in intact_checkpoints(folder, "step"):
        weights = [value for value in checkpoint.weights.values() if value.is_floating_point()]
        is_before = checkpoint.resume_key == resume_key and checkpoint.state["progress"]["step"] < before
        if is_before and all(map(is_finite, weights)):
            return {**checkpoint.state, "weights": checkpoint.weights, "precision": precision}
    return None
