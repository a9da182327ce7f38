"""Diagnosis of a non-finite trial: the operator, and a precision or loss scale that helps.

The batch after the trial's newest checkpoint runs forward and backward, without a compiler and on one rank. A
trial that ran in the same way had the same dropout masks. If something is not finite, the batch runs again
with every operator watched, and then with a lower loss scale, in bf16 and in fp32. The study is not changed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hpo.data.batches import Batch, collate
from hpo.errors import InputError, ModelError, TrialEnd
from hpo.memory import is_out_of_memory, release_free_memory
from hpo.models.adapters import load_trained
from hpo.outcome import Outcome
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import BASE_PRECISION, PRECISION, AmpConfig
from hpo.random_numbers import generator_states, manual_seed, set_generator_states, step_seed
from hpo.training.budget import TrainState
from hpo.training.checkpoint import Checkpoint, intact_checkpoints
from hpo.trial.executor import Executor
from hpo.trial.first_nonfinite import is_finite
from hpo.trial.measure import Side, Work
from hpo.trial.parts import TrialParts, build_trial, training_args
from hpo.trial.run import checkpoint_key
from hpo.trial.telemetry import StoredTrial

MIN_SCALE = "amp.min_scale"
LOWEST_SCALE = 2.0**-16
"""The lowest loss scale to try."""


@dataclass(frozen=True)
class Broken:
    """The first that is not finite (`logits`, `loss` or `gradients`), and its operator."""

    what: str
    operator: str | None


@dataclass(frozen=True)
class Remedy:
    """Other settings for the same batch, and their result."""

    settings: Mapping[str, Any]
    heals: bool | None
    """None: the batch could not run with them."""
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
    breaks_in_fp32: bool | None
    """True if the batch also breaks in IEEE fp32 with all weights in fp32. None: it did not run so."""

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        broken = self.broken
        weights = (
            "the last checkpoint" if self.has_checkpoint else "the initial weights (it has no checkpoint)"
        )
        result = f"{broken.what} not finite" if broken else "this batch is finite, run eagerly on one rank"
        yield f"Trial {self.trial} ({self.outcome}, {self.precision}), step {self.step}: {result}"
        yield f"Run with {weights}."
        if broken and broken.operator:
            yield f"First: {broken.operator}"
        for remedy in self.remedies:
            settings = ", ".join(f"{name}: {value}" for name, value in remedy.settings.items())
            yield f"With {settings}: {remedy.result}"
        if broken is None:
            yield "The trial broke later, in an evaluation, or only when compiled or on several ranks."
        elif not any(remedy.heals for remedy in self.remedies):
            yield (
                "The precision is not the cause. Lower `learning_rate` or `max_grad_norm`."
                if self.breaks_in_fp32
                else "It is not known whether the precision is the cause: the batch did not run in pure fp32."
            )


def diagnose(executor: Executor, trial: StoredTrial) -> Diagnosis:
    """Find the first non-finite numbers in the batch after a trial's checkpoint, and the remedies.

        Raises InputError if the trial is not `nonfinite`, cannot run on this device or does not fit into its
    memory.
    """
    must = f"trial {trial.number} must have"
    if trial.outcome != Outcome.NONFINITE:
        raise InputError(
            f"{must} ended as nonfinite, but it is {trial.outcome}. `hpo report STUDY` shows why each trial "
            "ended, and `hpo verify STUDY` checks the precisions."
        )
    here, ran_on = executor.device.type, trial.telemetry["device"]["type"]
    if ran_on != here:
        raise InputError(f"{must} run on a device of type {here}, but it ran on {ran_on}. Diagnose it there.")
    try:
        parts = _parts(executor, trial)
        start = _last_checkpoint(trial.folder, checkpoint_key(trial.resume_key, parts))
        side, what = _run(parts, start)
        broken = Broken(what, side.origin()["first_nonfinite"]) if what else None
    except (TrialEnd, ModelError) as error:
        raise InputError(f"trial {trial.number} cannot be run again here: {error}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"trial {trial.number} must fit into the memory of {executor.device.name}, but its batch does "
            "not. Free memory there, or diagnose the trial on a device with more."
        ) from error
    effective = parts.resolution.effective
    to_try = [*settings_to_try(side.mixed_precision, what)] if what else []
    del parts, side  # their memory is for the models of the remedies
    remedies = tuple(_try(executor, trial, start, settings) for settings in to_try)
    fp32_heals = remedies[-1].heals if remedies else False
    return Diagnosis(
        trial.number,
        trial.outcome,
        effective,
        1 + (start.state["progress"]["step"] if start else 0),
        start is not None,
        broken,
        remedies,
        None if broken is None or fp32_heals is None else not fp32_heals,
    )


def settings_to_try(amp: MixedPrecision, what: str) -> Iterator[dict[str, Any]]:
    """Yield possible remedies. The last is IEEE fp32 with all weights in fp32, unless `amp` has it."""
    precision = amp.precision
    if precision.loss_scaling and what == "gradients":
        yield {"init_scale": amp.config.min_scale, MIN_SCALE: LOWEST_SCALE}
    if precision.products != "float32":
        yield from ({PRECISION: name} for name in ("bf16", "fp32") if name != precision.name)
    if precision.frozen != "fp32":
        yield {PRECISION: "fp32", BASE_PRECISION: "fp32"}


def _try(
    executor: Executor, trial: StoredTrial, start: Checkpoint | None, settings: Mapping[str, Any]
) -> Remedy:
    release_free_memory(executor.device)  # the models before this one
    try:
        side, what = _run(_parts(executor, trial, **settings), start)
    except (TrialEnd, InputError) as error:
        return Remedy(settings, heals=None, result=f"not tried: {error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Remedy(settings, heals=None, result="not tried: out of memory")
    if what is None and MIN_SCALE in settings:
        scale = float(side.mixed_precision.scale_value())
        settings = {"init_scale": scale, MIN_SCALE: min(scale, AmpConfig().min_scale)}
    return Remedy(settings, heals=what is None, result=f"{what} not finite" if what else "finite")


def _parts(executor: Executor, trial: StoredTrial, **settings: Any) -> TrialParts:
    """Build the trial with other settings. Raises TrialEnd if it cannot run here."""
    params = {**trial.params, PRECISION: trial.telemetry["precision"]["effective"], **settings}
    if rows := trial.telemetry.get("micro_batch_size"):  # halved if memory ran out
        params["micro_batch_size"] = rows
    if parts := trial.telemetry.get("fp32_parts"):  # those that `auto` found
        params["fp32_parts"] = parts["resolved"]
    floor = params.pop(MIN_SCALE, executor.amp.min_scale)
    study = executor.resolved.with_amp(min_scale=floor, on_unsupported="prune")
    return build_trial(study, params, executor.loader)


def _last_checkpoint(folder: Path, resume_key: str) -> Checkpoint | None:
    """Return the newest checkpoint with finite weights."""
    for checkpoint in intact_checkpoints(folder, "step"):
        weights = [value for value in checkpoint.weights.values() if value.is_floating_point()]
        if checkpoint.resume_key == resume_key and all(map(is_finite, weights)):
            return checkpoint
    return None


def _run(parts: TrialParts, start: Checkpoint | None) -> tuple[Side, str | None]:
    """Run the batch after `start`. Return its last pass, and the first part that is not finite."""
    parts.prepare()
    amp, state = MixedPrecision(parts.resolution.precision, parts.config.amp, parts.device), TrainState()
    if start is not None:
        load_trained(parts.model, start.weights)
        amp.load_state_dict(start.state["mixed_precision"])
        state.load_state_dict(start.state["progress"])
    split, model = parts.data.train, parts.model.train()
    args = training_args(parts.study, parts.config, split.num_windows)
    windows = parts.data.batches(args.batch_size, args.seed, state.epoch)[state.batch]
    batch = collate(split, windows, parts.loss_fn.tasks, parts.data.pad_id)
    num_items = parts.loss_fn.count(batch)

    def forward(
        part: Batch, before: list[Tensor], after: list[Tensor], model: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        set_generator_states(before)  # a part may run several times, each with the same masks
        logits = model(*part.inputs)
        after[:] = generator_states()
        return parts.loss_fn(logits, part, num_items, len(part.windows_B) / len(batch.windows_B)), logits

    manual_seed(step_seed(args.seed, state.step))
    for part in batch.to(parts.device.torch_device).split(args.micro_batch_size):
        after: list[Tensor] = []
        run = partial(forward, part, generator_states(), after)
        side = Side(model, amp, Work(run, observed=run))
        if what := side.run_with_backoff().broken():
            break
        set_generator_states(after)
    return side, what
