"""Where a trial stopped being finite, and which precision or loss scale helps: the library of `hpo diagnose`.

The batch after the trial's newest checkpoint runs forward and backward, eagerly and with the dropout masks of
its step. If something is not finite, it runs again with every operator watched, and then with a lower loss
scale, in bf16 and in fp32. The study is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hpo.data.batches import Batch, collate, training_batches
from hpo.errors import InputError, ModelError, TrialEnd
from hpo.models.adapters import load_trained
from hpo.outcome import Outcome
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISION, AmpConfig
from hpo.random_numbers import manual_seed
from hpo.training.checkpoint import Checkpoint, intact_checkpoints
from hpo.training.progress import TrainState
from hpo.training.step_seed import step_seed
from hpo.trial.executor import Executor
from hpo.trial.measure import Side, Work
from hpo.trial.nonfinite import is_finite
from hpo.trial.trial_parts import TrialParts, build_trial, training_args
from hpo.trial.trial_run import checkpoint_key

MIN_SCALE = "amp.min_scale"
LOWEST_SCALE = 2.0**-16
"""The lowest loss scale to try."""


@dataclass(frozen=True)
class StoredTrial:
    """A trial of a study. The checkpoints in `folder` belong to `resume_key`."""

    number: int
    outcome: str
    params: Mapping[str, Any]
    telemetry: Mapping[str, Any]
    folder: Path
    resume_key: str


@dataclass(frozen=True)
class Broken:
    """What is not finite first (`logits`, `loss` or `gradients`), and the operator that made it."""

    what: str
    operator: str | None


@dataclass(frozen=True)
class Remedy:
    """Settings that replaced the trial's for the same batch."""

    settings: Mapping[str, Any]
    heals: bool
    result: str


@dataclass(frozen=True)
class Diagnosis:
    """The result for one trial. JSON-able by `asdict`."""

    trial: int
    outcome: str
    precision: str
    step: int
    """The training step of the batch, from 1."""
    has_checkpoint: bool
    """Without a checkpoint, the weights are the initial ones and the batch is the first."""
    broken: Broken | None
    """None if all values are finite."""
    remedies: tuple[Remedy, ...]


def diagnose(executor: Executor, trial: StoredTrial) -> Diagnosis:
    """Find what is not finite in the batch after a trial's checkpoint, and what helps there.

    Raises InputError if the trial is not `nonfinite` or cannot run on this device.
    """
    must = f"trial {trial.number} must have"
    if trial.outcome != Outcome.NONFINITE:
        raise InputError(
            f"{must} ended as nonfinite, but it is {trial.outcome}. Why a precision is incompatible is the "
            "trial's reason; `hpo verify STUDY` compares them."
        )
    here, ran_on = executor.device.type, trial.telemetry["device"]["type"]
    if ran_on != here:
        raise InputError(f"{must} run on a device of type {here}, but it ran on {ran_on}. Diagnose it there.")
    try:
        parts = _parts(executor, trial)
        start = _last_checkpoint(trial.folder, checkpoint_key(trial.resume_key, parts))
        side, what = _run(parts, start)
    except (TrialEnd, ModelError) as error:
        raise InputError(f"trial {trial.number} cannot be run again here: {error}") from error
    broken = Broken(what, side.origin()["first_nonfinite"]) if what else None
    to_try = _to_try(side.mixed_precision, what) if what else ()
    return Diagnosis(
        trial.number,
        trial.outcome,
        parts.resolution.effective,
        1 + (start.state["progress"]["step"] if start else 0),
        start is not None,
        broken,
        tuple(_try(executor, trial, start, settings) for settings in to_try),
    )


def _to_try(amp: MixedPrecision, what: str) -> Iterator[dict[str, Any]]:
    """Yield settings that may help; none if the precision multiplies in fp32 already."""
    if amp.precision.loss_scaling and what == "gradients":
        yield {"init_scale": amp.config.min_scale, MIN_SCALE: LOWEST_SCALE}
    if amp.precision.linear_dtype != "float32":
        yield from ({PRECISION: name} for name in ("bf16", "fp32") if name != amp.precision.name)


def _try(
    executor: Executor, trial: StoredTrial, start: Checkpoint | None, settings: Mapping[str, Any]
) -> Remedy:
    try:
        side, what = _run(_parts(executor, trial, **settings), start)
    except (TrialEnd, InputError) as error:
        return Remedy(settings, heals=False, result=f"not tried: {error}")
    if what is None and MIN_SCALE in settings:
        scale = float(side.mixed_precision.scale_value())
        settings = {"init_scale": scale, MIN_SCALE: min(scale, AmpConfig().min_scale)}
    return Remedy(settings, heals=what is None, result=f"{what} not finite" if what else "finite")


def _parts(executor: Executor, trial: StoredTrial, **settings: Any) -> TrialParts:
    """Build the trial with other settings. Raises TrialEnd if it cannot run here."""
    params = {**trial.params, PRECISION: trial.telemetry["precision"]["effective"], **settings}
    if rows := trial.telemetry.get("micro_batch_size"):  # halved if memory ran out
        params["micro_batch_size"] = rows
    amp = executor.study.amp
    floor = params.pop(MIN_SCALE, amp.min_scale)
    amp = amp.model_copy(update={"min_scale": floor, "on_unsupported": "prune"})
    study = executor.study.model_copy(update={"amp": amp})
    return build_trial(study, executor.device, params, executor.loader)


def _last_checkpoint(folder: Path, resume_key: str) -> Checkpoint | None:
    """Return the newest checkpoint with finite weights."""
    for checkpoint in intact_checkpoints(folder, "step"):
        weights = [value for value in checkpoint.weights.values() if value.is_floating_point()]
        if checkpoint.resume_key == resume_key and all(map(is_finite, weights)):
            return checkpoint
    return None


def _run(parts: TrialParts, start: Checkpoint | None) -> tuple[Side, str | None]:
    """Run the batch after `start`. Return its last pass, and what is not finite in it."""
    parts.prepare()
    amp, state = MixedPrecision(parts.resolution.precision, parts.config.amp, parts.device), TrainState()
    if start is not None:
        load_trained(parts.model, start.weights)
        amp.load_state_dict(start.state["mixed_precision"])
        state.load_state_dict(start.state["progress"])
    split, model = parts.data.train, parts.model.train()
    args = training_args(parts.study, parts.config, split.num_windows)
    windows = training_batches(split.lengths_W, args.batch_size, args.seed, state.epoch)[state.batch]
    batch = collate(split, windows, parts.loss_fn.tasks, parts.data.pad_id)
    num_items = parts.loss_fn.count(batch)

    def forward(part: Batch, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        manual_seed(step_seed(args.seed, state.step))
        logits = model(*part.inputs)
        return parts.loss_fn(logits, part, num_items, len(part.windows_B) / len(batch.windows_B)), logits

    for part in batch.to(parts.device.torch_device).split(args.micro_batch_size):
        run = partial(forward, part)
        side = Side(model, amp, Work(run, observed=run))
        if what := side.run_with_backoff().broken():
            break
    return side, what
