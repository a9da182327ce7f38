"""Why a trial went wrong numerically, and what heals it: the library behind `hpo diagnose`.

    nonfinite      the training is run again to its first bad step, the operator that it goes back to is
                   named, and with each remedy the steps around it are made again, from a few steps before
    incompatible   likewise with the compatibility check, which is made again with each remedy
    others         the modules farthest from fp32, with the weights of the best evaluation

Nothing of the study is written: what is tried is kept in memory alone.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.errors import Incompatible, InputError, ModelError, RunError, TrialEnd
from hpo.models.attention import use_training_attention
from hpo.models.model_parts import parts_with
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Outcome
from hpo.precision.amp import MixedPrecision, backend_flags, prepare_model
from hpo.precision.environment import refuse_overrides
from hpo.precision.part_names import LOSS
from hpo.precision.table import PRECISION, Resolution, resolve
from hpo.training.checkpoint import best_checkpoint
from hpo.trial.adverse import adverse_batch, with_extreme_class_weights
from hpo.trial.compat import Compatibility, judge, measure_parts
from hpo.trial.distance import ModuleError, module_errors
from hpo.trial.executor import Executor
from hpo.trial.remedies import AMP, Broken, Remedy, try_remedies
from hpo.trial.replay import BadStep, Replay, stored_snapshot, trace_batch
from hpo.trial.tracing import Origin
from hpo.trial.trial_parts import TrialParts
from hpo.trial.trial_run import check_overrides, checkpoint_key

STEPS_AFTER = 3
"""Steps after the bad one that a remedy must make too, and steps that must update the weights."""
NUM_MODULES = 10
_RAISED_IN = re.compile(r"\w+ in ([\w.]+): ")
"""How a measurement names the module that raised an error."""


@dataclass(frozen=True)
class StoredTrial:
    """What a study has of a trial."""

    number: int
    outcome: str
    reason: str
    params: Mapping[str, Any]
    telemetry: Mapping[str, Any]
    folder: Path
    """Of its checkpoints."""
    resume_key: str
    """What `Executor.run` was given."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found. JSON-able by `asdict`."""

    trial: int
    outcome: str
    precision: str
    """The effective one."""
    what: str | None = None
    """As `Broken.what`; None: nothing is wrong."""
    step: int | None = None
    """The first bad step, from 1; None where it was not in training."""
    started_at: int = 0
    """The step of the checkpoint that the training was run again from; 0 is its beginning."""
    origin: Origin | None = None
    parts: tuple[str, ...] = ()
    """As `Broken.parts`."""
    remedies: tuple[Remedy, ...] = ()
    farthest: tuple[ModuleError, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def healed_by(self) -> dict[str, Any] | None:
        """The settings of the first remedy that heals; they are in the order of how little they change."""
        return next((remedy.settings for remedy in self.remedies if remedy.heals), None)


class _Case:
    """A trial on an executor of its study."""

    def __init__(self, executor: Executor, trial: StoredTrial) -> None:
        self.executor = executor
        self.trial = trial
        self.precision = _effective_precision(trial, executor.device.type)
        rows = trial.telemetry.get("micro_batch_size")  # halved where memory ran out
        self.params = {**trial.params, PRECISION: self.precision} | (
            {"micro_batch_size": rows} if rows else {}
        )
        self.config, self.resolution = self.with_settings({})

    def with_settings(self, settings: Mapping[str, Any]) -> tuple[TrialConfig, Resolution]:
        """The trial's configuration with other settings. Raises Unsupported and Incompatible."""
        executor, params = self.executor, {**self.params, **settings}
        amp = {name.removeprefix(AMP): params.pop(name) for name in settings if name.startswith(AMP)}
        amp_config = executor.amp.model_copy(update=amp)
        config = build_trial_config(executor.study, params, self.precision, amp_config)
        refuses = config.amp.model_copy(update={"on_unsupported": "prune"})
        resolution = resolve(config.fp_precision, executor.device, refuses)
        check_overrides(config, resolution)
        refuse_overrides([resolution.effective], config.amp, executor.device.type)
        return config, resolution

    def device_notes(self) -> Iterator[str]:
        """That the trial ran on another model of device, whose kernels round in another order."""
        ran_on, here = self.trial.telemetry["device"].get("name"), self.executor.device.name
        if ran_on != here:
            yield f"The trial ran on another device ({ran_on}) than this one ({here}): numbers differ."

    def notes(self) -> Iterator[str]:
        """What keeps the training from being exactly the same."""
        yield from self.device_notes()
        if fallbacks := self.trial.telemetry.get("fp32_fallbacks"):
            yield (
                f"The trial made {fallbacks} of its micro-batches again in fp32, where they were not finite "
                "(`amp.fallback_to_fp32`); here that is off, so the first of them is what broke."
            )
        if self.config.compile != "none":
            yield f"The trial was compiled (`compile: {self.config.compile}`); here it runs eagerly."
        if self.config.max_seconds is not None:
            yield (
                "The trial had a budget of seconds, which its learning rates follow: they differ a little "
                "with the speed."
            )
        ranks = self.trial.telemetry.get("num_ranks", 1)
        if ranks > 1:
            yield f"The trial had {ranks} ranks, each with dropout masks of its own; here there is one."


def diagnose(
    executor: Executor, trial: StoredTrial, max_steps: int, say: Callable[[str], None] = lambda _: None
) -> Diagnosis:
    """Find where a trial went wrong and what heals it, making at most `max_steps` of its steps again.

    The steps around the bad one are made again for each remedy besides. `say` is told what is begun and how
    long it takes.

    Raises InputError for a trial that cannot be diagnosed, or not in so many steps; RunError where its
    checkpoint is gone.
    """
    was_refused = trial.outcome == Outcome.INCOMPATIBLE
    try:
        case = _Case(executor, trial)
        if was_refused:
            return _diagnose_check(case, say)
    except (TrialEnd, ModelError) as error:
        if was_refused and isinstance(error, Incompatible | ModelError):
            why = "never trained, and not for its numbers"
        elif isinstance(error, TrialEnd):
            why = "cannot be run again on this device"
        else:
            raise
        raise InputError(f"trial {trial.number} {why}: {error}") from error
    if trial.outcome == Outcome.NONFINITE:
        return _diagnose_training(case, max_steps, say)
    return _diagnose_best(case, say)


def _effective_precision(trial: StoredTrial, device_type: str) -> str:
    """The precision that the trial ran under. Raises InputError where there is nothing to run again here."""
    number, outcome = trial.number, trial.outcome
    if outcome in ("running", Outcome.PREEMPTED):
        raise InputError(f"trial {number} must have ended, but it is {outcome}. Wait, or pause the study.")
    precision = trial.telemetry.get("precision", {}).get("effective")
    if precision is None:
        why = f": {trial.reason}" if trial.reason else ""
        raise InputError(f"trial {number} must have begun, but it never did ({outcome}{why}).")
    if outcome == Outcome.PRUNED:
        raise InputError(
            f"trial {number} was pruned, and no pruned trial keeps its weights. Take one that is complete, "
            "nonfinite or incompatible."
        )
    if outcome not in (Outcome.NONFINITE, Outcome.INCOMPATIBLE, Outcome.COMPLETE):
        raise InputError(f"trial {number} ended as {outcome}, which is not about numbers: {trial.reason}")
    ran_on = trial.telemetry.get("device", {}).get("type")
    if ran_on != device_type:
        raise InputError(
            f"trial {number} ran on another type of device ({ran_on}) than this one ({device_type}), whose "
            "numbers are others. Diagnose it there."
        )
    return str(precision)


def _diagnose_training(case: _Case, max_steps: int, say: Callable[[str], None]) -> Diagnosis:
    executor, trial, config = case.executor, case.trial, case.config
    last = int(trial.telemetry.get("num_steps", 0))
    key = checkpoint_key(
        trial.resume_key, config, case.resolution, executor.device, executor.used_ids(config)
    )
    start = stored_snapshot(trial.folder, key, case.precision, before=last)
    started_at = start.step if start else 0
    num_steps = last + 1 - started_at
    seconds = float(trial.telemetry.get("train_seconds", 0.0)) / max(last, 1)
    where = (
        f"from its checkpoint of step {started_at}" if start else "from its first step: no checkpoint is left"
    )
    if num_steps > max_steps:
        raise InputError(
            f"trial {trial.number} broke by step {last}, so up to {num_steps} steps are to be made again "
            f"({where}), about {num_steps * seconds:.0f} s, but --max-steps allows {max_steps}. Raise it."
        )
    say(
        f"running trial {trial.number} again {where}; at most {num_steps} steps, about "
        f"{num_steps * seconds:.0f} s, then about {2 * STEPS_AFTER + 2} steps for each remedy"
    )
    evaluates = bool(trial.telemetry.get("nonfinite_in_evaluation", True))  # older records do not say
    replay = Replay(executor, config, case.resolution, start)
    bad = replay.run(last + 1, evaluates=evaluates)
    notes = tuple(case.notes())
    found = Diagnosis(trial.number, trial.outcome, case.precision, started_at=started_at, notes=notes)
    if bad is None:
        finite = f"All of the {replay.state.step - started_at} steps that were made again are finite."
        return replace(found, notes=(finite, *notes))
    before, first = replay.snapshots[0], _broken_at(replay, bad)
    until = bad.step + STEPS_AFTER

    def attempt(settings: Mapping[str, Any]) -> Broken | str:
        own_scale = "init_scale" in settings
        other = Replay(executor, *case.with_settings(settings), before, own_scale=own_scale)
        found = other.run(until, num_updates=STEPS_AFTER, evaluates=evaluates)
        if found is not None:
            return _broken_at(other, found)
        began = before.step if before else 0
        num_updates, num_steps = other.mixed_precision.num_updates, other.state.step - began
        steps = f"from step {began + 1} to {other.state.step}"
        if num_updates < min(STEPS_AFTER, num_steps):
            skipped = f"{num_steps - num_updates} of {num_steps}"
            return Broken("gradients", None, (), f"the scaler skipped {skipped} steps {steps}")
        skipped = f", {num_steps - num_updates} of them skipped" if num_steps > num_updates else ""
        return f"finite {steps}{skipped}"

    remedies = tuple(try_remedies(config, case.resolution, first, bad, attempt, say))
    return replace(
        found, what=bad.what, step=bad.step, origin=first.origin, parts=first.parts, remedies=remedies
    )


def _broken_at(replay: Replay, bad: BadStep) -> Broken:
    origin = replay.origin(bad)
    text = f"{bad.what} not finite at step {bad.step}{_in(origin)}"
    return Broken(bad.what, origin, _parts_of(replay.model, origin), text)


def _diagnose_check(case: _Case, say: Callable[[str], None]) -> Diagnosis:
    say("making the compatibility check again, once for each remedy too")
    trial = case.trial

    def check(settings: Mapping[str, Any]) -> tuple[TrialParts, Compatibility]:
        config, resolution = case.with_settings(settings)
        parts = case.executor.parts(config, resolution)
        with backend_flags(resolution.precision, config.amp):
            return parts, judge(measure_parts(parts, case.executor.device), case.executor.study.compat)

    def broken(parts: TrialParts, found: Compatibility) -> Broken | str:
        if found.verdict != "incompatible":
            return f"the check is {found.verdict}"
        measured = found.measurement
        what = "raised" if measured.error else measured.nonfinite or "far"
        origin, named = None, tuple[str, ...]()
        if measured.nonfinite:
            origin = _origin_in_check(case, parts)
            named = _parts_of(parts.model, origin)
        elif measured.error and (where := _RAISED_IN.match(measured.error)):
            named = tuple(parts_with(parts.model, where[1]))
        elif what == "far":
            # The farthest may lie in no part, such as the model's own sums between its layers.
            all_of = (parts_with(parts.model, one.module) for one in _farthest(case, parts))
            named = tuple(next(filter(None, all_of), ()))
        return Broken(what, origin, named, " ".join(found.reasons))

    parts, compatibility = check({})
    first = broken(parts, compatibility)
    found = Diagnosis(trial.number, trial.outcome, case.precision, notes=tuple(case.device_notes()))
    if isinstance(first, str):
        return replace(found, notes=(f"Made again, {first}.", *found.notes))
    farthest = _farthest(case, parts) if first.what == "far" else ()
    remedies = try_remedies(
        case.config, case.resolution, first, parts.model, lambda settings: broken(*check(settings)), say
    )
    return replace(
        found,
        what=first.what,
        origin=first.origin,
        parts=first.parts,
        remedies=tuple(remedies),
        farthest=farthest,
        notes=(first.text, *found.notes),
    )


def _origin_in_check(case: _Case, parts: TrialParts) -> Origin | None:
    """As the check runs it: with the attention of training and no dropout, at the smallest loss scale."""
    amp = parts.config.amp.model_copy(update={"init_scale": parts.config.amp.min_scale})
    mixed_precision = MixedPrecision(parts.resolution.precision, amp, case.executor.device)
    losses = [one for one in (parts.loss_fn, with_extreme_class_weights(parts.loss_fn)) if one is not None]
    model = copy.deepcopy(parts.model).eval()
    prepare_model(model, parts.resolution.precision)
    with backend_flags(parts.resolution.precision, amp), use_training_attention():
        for loss_fn, batch in itertools.product(losses, (adverse_batch(parts), parts.batch(0, 1))):
            origin = trace_batch(model, loss_fn, batch, loss_fn.count(batch), mixed_precision)
            if origin is not None:
                return origin
    return None


def _diagnose_best(case: _Case, say: Callable[[str], None]) -> Diagnosis:
    trial, executor = case.trial, case.executor
    best = best_checkpoint(trial.folder)
    if best is None:
        raise RunError(
            f"the checkpoint of trial {trial.number} must be in {trial.folder}, but there is none that is "
            "intact. It is written where the trial ran; checkpoint.top_k says how many trials keep theirs."
        )
    say(f"comparing the modules of trial {trial.number} with fp32, with its best weights")
    parts = executor.parts(case.config, case.resolution)
    parts.model.load_state_dict(best.weights)
    is_reference = case.precision == "fp32"
    return Diagnosis(
        trial.number,
        trial.outcome,
        case.precision,
        farthest=_farthest(case, parts),
        notes=(
            *(["fp32 is what the others are compared with."] if is_reference else []),
            *case.device_notes(),
        ),
    )


def _farthest(case: _Case, parts: TrialParts) -> tuple[ModuleError, ...]:
    precision = MixedPrecision(parts.resolution.precision, parts.config.amp, case.executor.device)
    return tuple(module_errors(parts.model, precision, adverse_batch(parts))[:NUM_MODULES])


def _parts_of(model: MultitaskModel, origin: Origin | None) -> tuple[str, ...]:
    if origin is None:
        return ()
    return (LOSS,) if origin.module is None else tuple(parts_with(model, origin.module))


def _in(origin: Origin | None) -> str:
    if origin is None:
        return ""
    return f", from {origin.operator} in {origin.place} ({origin.phase})"
