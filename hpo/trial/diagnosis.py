"""Where a trial stopped being finite, and what heals it: the library behind `hpo diagnose`.

The training of a `nonfinite` trial is run again from its newest checkpoint to its first bad step, that step
once more with every operator watched, and then the steps around it with one remedy after the other, until
one heals. Nothing of the study is written. What broke an `incompatible` trial is in its own record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.config.trial_config import SCALER_SETTINGS
from hpo.errors import InputError, ModelError, TrialEnd
from hpo.outcome import Outcome
from hpo.precision.table import PRECISION, PRECISIONS, AmpConfig
from hpo.trial.executor import Executor
from hpo.trial.replay import NUM_UPDATES, Replay, stored_state
from hpo.trial.trial_parts import TrialParts, build_trial
from hpo.trial.trial_run import checkpoint_key

CLIP_FACTOR, RATE_FACTOR = 10.0, 10.0
"""What the norm of the gradients and the learning rate are divided by."""
MIN_SCALE = "amp.min_scale"
Say = Callable[[str], None]


@dataclass(frozen=True)
class StoredTrial:
    """What a study has of a trial: `folder` holds its checkpoints, which are those of `resume_key`."""

    number: int
    outcome: str
    params: Mapping[str, Any]
    telemetry: Mapping[str, Any]
    folder: Path
    resume_key: str


@dataclass(frozen=True)
class Broken:
    """How a training ended badly."""

    what: str
    """What was not finite: `loss`, `gradients` or `logits`."""
    text: str
    operator: str | None = None
    """That made the first such number, with its module; None where that is not known."""


@dataclass(frozen=True)
class Remedy:
    """Settings that were tried in place of the trial's."""

    settings: dict[str, Any]
    heals: bool
    result: str


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a trial now. JSON-able by `asdict`."""

    trial: int
    outcome: str
    precision: str
    broken: Broken | None
    """None: all was finite this time."""
    remedies: tuple[Remedy, ...]
    """In the order in which they were tried, to the first that heals."""
    healed_by: Mapping[str, Any] | None


def diagnose(executor: Executor, trial: StoredTrial, say: Say = lambda _: None) -> Diagnosis:
    """Find where a trial stopped being finite and what heals it; `say` is told what is begun.

    Raises InputError for a trial that cannot be diagnosed.
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
        case = _Case(executor, trial)
        say(case.plan)
        began = time.perf_counter()
        broken = case.attempt({})
    except (TrialEnd, ModelError) as error:
        raise InputError(f"trial {trial.number} cannot be run again here: {error}") from error
    remedies: list[Remedy] = []
    if broken is not None:
        say(f"after {time.perf_counter() - began:.0f} s: {broken.text}")
        for remedy in _try_remedies(case, say):
            remedies.append(remedy)
            if remedy.heals:
                break
    healed_by = remedies[-1].settings if remedies and remedies[-1].heals else None
    return Diagnosis(trial.number, trial.outcome, case.precision, broken, tuple(remedies), healed_by)


class _Case:
    """A trial that is run again: first to where it breaks, then the steps around that."""

    def __init__(self, executor: Executor, trial: StoredTrial) -> None:
        self.executor = executor
        self.precision: str = trial.telemetry["precision"]["effective"]
        self.params = {**trial.params, PRECISION: self.precision}
        if rows := trial.telemetry.get("micro_batch_size"):  # halved where memory ran out
            self.params["micro_batch_size"] = rows
        parts, last = self.parts({}), int(trial.telemetry["num_steps"])
        self.config = parts.config
        key = checkpoint_key(trial.resume_key, parts)
        self.start, self.until = stored_state(trial.folder, key, self.precision, before=last), last + 1
        begun = self.start["progress"]["step"] if self.start else 0
        seconds = float(trial.telemetry["train_seconds"]) / max(last, 1)
        num_steps, around = self.until - begun, 2 * NUM_UPDATES + 2
        self.plan = (
            f"running trial {trial.number} again from step {begun + 1}: at most {num_steps} steps, about "
            f"{num_steps * seconds:.0f} s; then about {around} steps ({around * seconds:.0f} s) a remedy"
        )

    def parts(self, settings: Mapping[str, Any]) -> TrialParts:
        """The trial's with other settings. Raises TrialEnd where it cannot run here."""
        study, params = self.executor.study, {**self.params, **settings}
        floor = params.pop(MIN_SCALE, study.amp.min_scale)
        amp = study.amp.model_copy(update={"min_scale": floor, "on_unsupported": "prune"})
        study = study.model_copy(update={"amp": amp})
        return build_trial(study, self.executor.device, params, self.executor.loader)

    def attempt(self, settings: Mapping[str, Any]) -> Broken | None:
        """Run with other settings than the trial's; None: all was finite."""
        replay = Replay(self.parts(settings), self.start)
        if scale := settings.get("init_scale"):  # and not that of the state
            replay.mixed_precision.update_amp_config(init_scale=scale)
        before = replay.state.step
        if (bad := replay.run(self.until)) is not None:
            step, what = bad
            if not settings:  # the trial itself
                self.start, self.until = replay.snapshots[0], step + NUM_UPDATES
            return Broken(what, f"{what} not finite at step {step}", replay.origin(what))
        num_steps, num_updates = replay.state.step - before, replay.mixed_precision.num_updates
        if num_updates >= min(NUM_UPDATES, num_steps):
            return None
        return Broken("gradients", f"the scaler skipped {num_steps - num_updates} of {num_steps} steps")


def _try_remedies(case: _Case, say: Say) -> Iterator[Remedy]:
    """The outcome of one remedy after the other; the last two tell whether the precision is to blame."""
    config, precision = case.config, PRECISIONS[case.precision]
    is_reduced = precision.linear_dtype != "float32"

    def tried(settings: dict[str, Any]) -> Remedy:
        say(f"trying {shown(settings)}")
        try:
            remaining = case.attempt(settings)
        except (TrialEnd, InputError) as error:
            return Remedy(settings, heals=False, result=f"not tried: {error}")
        return Remedy(settings, heals=remaining is None, result=remaining.text if remaining else "finite")

    if precision.loss_scaling:
        default = {name: getattr(AmpConfig(), name) for name in (*SCALER_SETTINGS, "min_scale")}
        if default != config.amp.model_dump(include=set(default)):
            yield tried({MIN_SCALE if name == "min_scale" else name: default[name] for name in default})
    if is_reduced and case.precision != "bf16":
        yield tried({PRECISION: "bf16"})
    yield tried({"max_grad_norm": config.max_grad_norm / CLIP_FACTOR if config.max_grad_norm else 1.0})
    if is_reduced:
        yield tried({PRECISION: "fp32"})
    yield tried({"learning_rate": config.learning_rate / RATE_FACTOR})


def shown(settings: Mapping[str, Any]) -> str:
    """As in a study file."""
    texts = {name: f"{value:g}" if isinstance(value, float) else value for name, value in settings.items()}
    return ", ".join(f"{name}: {text}" for name, text in texts.items())
