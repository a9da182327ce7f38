"""Common code of running trials: resume, evaluations, limits, checkpoints and the end.

`TrialRun` trains with the loop of this package, `OwnTrial` with the training function of a study's code.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from hpo.config.limits import ENERGY, MEASURED_METRICS, broken_limits
from hpo.device import EnergyCounter, Utilization
from hpo.device_time import DeviceTime, busy_text
from hpo.errors import Incompatible, Invalid, Paused, Preempted, Pruned
from hpo.memory import peak_memory_bytes, release_free_memory, reset_peak_memory
from hpo.outcome import Progress
from hpo.precision.amp import MixedPrecision, backend_flags
from hpo.precision.observation import Agreement, Observation, changed_conditions, conditions
from hpo.precision.sums import float32_sums
from hpo.tasks.kind import Task
from hpo.training import distributed
from hpo.training.budget import TrainState
from hpo.training.checkpoint import (
    Checkpoint,
    CheckpointMirror,
    CheckpointStore,
    NoCheckpoints,
    best_checkpoint,
    bits_digest,
)
from hpo.training.evaluate import Evaluation
from hpo.training.loop import CHECK_EVERY
from hpo.training.throughput import CompileClock, ThroughputMeter
from hpo.trial.compat import Compatibility, checked_on
from hpo.trial.objectives import final_values, is_better, objective_value, patience_over, undefined_metric
from hpo.trial.telemetry import Callbacks, TrialRecorder

CHECKPOINT_FORMAT = 12
"""Raise it when the state in a checkpoint changes. A trial does not resume from another format."""

UTILIZATION_EVERY = 20
"""Steps between two samples of the device's utilisation and its memory."""

TOO_SHORT = (
    "the training was too short, after its warm-up and between evaluations, checkpoints and compilations. "
    "Give it a larger budget, evaluate less often, or use `compile: none`."
)

RATED_STEPS = 13
"""Steps, with those of the warm-up, before a limit of training speed may end a trial."""


class BaseRun(ABC):
    """One running trial: its progress, its evaluations and its checkpoints."""

    utilization: Utilization
    store: CheckpointStore
    mixed_precision: MixedPrecision
    last_evaluation: Evaluation
    tasks: Sequence[Task] = ()
    """The tasks of the model; none if the study's own code trains."""
    num_steps: int | None = None  # steps of the whole training; None: unknown

    def __init__(
        self,
        parts: Any,
        recorder: TrialRecorder,
        callbacks: Callbacks,
        energy_counter: EnergyCounter | None = None,
    ) -> None:
        self.parts = parts
        self.recorder = recorder
        self.callbacks = callbacks
        self.energy_counter = energy_counter
        self.meter = ThroughputMeter(parts.device, counter=energy_counter)
        self.device_time = DeviceTime(parts.device, callbacks.other_workers)
        self.compile_clock = CompileClock()
        self.state = TrainState()
        self.evaluation_rates: list[float] = []
        self.first_values: list[float] = []
        """The first objective at each evaluation."""
        self.stopped_early = ""
        """The reason why the training ends before its budget is used up."""
        self.best: Evaluation | None = None
        self.undefined = ""
        """A metric of an objective or a limit without a value in the last evaluation."""
        self.train_loss: float | None = None
        self.examples_per_second: float | None = None
        self.last_saved = time.monotonic()
        self.seen: Observation | None = None
        """The observed products; None: nothing was observed."""
        self.unverified = ""
        """A reason why the observation does not show the precision of the whole training."""
        self._observed_models: dict[int, tuple[nn.Module, Mapping[str, str]]] = {}
        """{id: a model, and its `conditions` at its first observation}."""

    @contextmanager
    def checkpoints(self, folder: Path | None, key: str, mirror: CheckpointMirror | None) -> Iterator[None]:
        """Open the checkpoints with this key and set the precision's backend flags during the block."""
        recorder, device = self.recorder, self.parts.device
        # The functions must not refer to `self`, or the model stays in memory until garbage is collected.
        recorder.follow(lambda: {"peak_memory_bytes": peak_memory_bytes(device)})
        store = NoCheckpoints() if folder is None else CheckpointStore(folder, key, mirror)
        recorder.follow(lambda: {"checkpoint_problems": list(store.problems)})
        precision, amp = self.parts.resolution.precision, self.parts.config.amp
        self.mixed_precision = MixedPrecision(precision, amp, device)
        with backend_flags(precision, amp), float32_sums(precision), store as self.store:
            yield

    @abstractmethod
    def run(
        self, folder: Path | None, resume_key: str, mirror: CheckpointMirror | None = None
    ) -> tuple[float, ...]:
        """Run the trial to its end and return its values; the arguments and errors are `Executor.run`'s."""

    @abstractmethod
    def _load(self, checkpoint: Checkpoint) -> None:
        """Load the model and the optimizer of a checkpoint."""

    @abstractmethod
    def _weights(self) -> dict[str, Tensor]:
        """Return the weights for a checkpoint."""

    @abstractmethod
    def _training_state(self) -> dict[str, Any]:
        """Return the state for a resume, besides the progress of the trial."""

    @abstractmethod
    def _optimizer_facts(self) -> dict[str, Any]:
        """Return the format and the bytes of the optimizer's state."""

    @abstractmethod
    def _budget_used(self) -> float:
        """Return the used share of the trial's budget."""

    def _on_values(self, evaluation: Evaluation) -> None:  # noqa: B027
        """Handle an evaluation before it is reported."""

    def _best_state(self) -> dict[str, Any]:
        """Return the state beside the weights of the best evaluation."""
        return {"precision": self.parts.resolution.effective, "best": self.best and asdict(self.best)}

    def _keep_best(self, best: Evaluation) -> bool:
        """Keep the checkpoints of a finished trial. Returns whether its best weights are there."""
        return self.store.finish(best.step)

    # The precision

    def judge(self, compatibility: Compatibility, *more: str) -> None:
        """Record the check of the precision. Raises the end of a trial that did not pass.

        `more` are reasons besides those of the check.
        """
        device = self.parts.device
        self.recorder.note(compatibility=compatibility.telemetry() | {"checked_on": checked_on(device)})
        for end in (Incompatible, Invalid):
            if compatibility.verdict == end.outcome:
                raise end(" ".join((*compatibility.reasons, *more)))

    def observed(self, model: nn.Module, seen: Observation) -> Agreement:
        """Record the observed products of a model, and its conditions: they must stay the same."""
        self.seen = seen
        self._observed_models.setdefault(id(model), (model, conditions(model)))
        return self._note_precision()

    def _check_conditions(self) -> None:
        """Record if anything that decides the formats of products has changed since the observation."""
        changes = [changed_conditions(before, model) for model, before in self._observed_models.values()]
        self.unverified = self.unverified or next(filter(None, changes), "")
        if self.unverified:
            self._note_precision()

    def _note_precision(self) -> Agreement:
        resolution, seen = self.parts.resolution, self.seen or Observation()
        agreement = seen.agreement(resolution.precision)
        if self.unverified and agreement.agrees is not False:
            agreement = Agreement(None, self.unverified)
        agrees, reason = agreement
        observed = {
            "observed": seen.telemetry(),
            "agrees": agrees,
            "reason": " ".join(filter(None, (resolution.reason, reason))),
            "observed_reason": reason,  # without the reason of a fallback
        }
        self.recorder.note(precision=asdict(resolution) | observed)
        return agreement

    # Checkpoints

    def _resume(self) -> None:
        """Continue from the trial's last checkpoint if there is one.

        The best weights may be newer than the last checkpoint. Their evaluation is then made again, but its
        reported value stays the best until there is a better one.
        """
        # Rank 0 alone reads checkpoints, so that all continue from the same.
        best, last = distributed.decide(lambda: (self.store.best(), self.store.latest()))
        for best_state in [one.state["best"] for one in (best, last) if one and one.state["best"]]:
            # The best weights may be older, too, if newer ones could not be written.
            evaluation = Evaluation.from_state_dict(best_state)
            values = self.best.values if self.best else None
            if is_better(self.parts.study.objective[0], evaluation.values, values):
                self._set_best(evaluation)
        if last is None:
            return
        state = last.state
        self._load(last)
        self.mixed_precision.load_state_dict(state.get("mixed_precision", {}))
        self.state.load_state_dict(state["progress"])
        self.evaluation_rates = list(state["evaluation_rates"])
        self.first_values = list(state["first_values"])
        self.meter.load_state_dict(state["meter"])
        self.unverified = state.get("unverified", "")  # not in earlier versions
        self.device_time.totals = state.get("device_time", {})
        self.recorder.note(resumed_from_step=self.state.step)

    def _save(self, best: Mapping[str, Any] | None = None, *, at_end: bool = False) -> None:
        """Write a checkpoint, at the end of the budget without the state for a resume.

        Raises Nonfinite if the training cannot recover: a resumed trial would forget that.
        """
        self.mixed_precision.check()
        self._enter("saving")
        state = {
            "progress": self.state.state_dict(),
            **self._training_state(),
            "mixed_precision": self.mixed_precision.state_dict(),
            "best": self.best and asdict(self.best),
            "evaluation_rates": self.evaluation_rates,
            "first_values": self.first_values,
            "meter": self.meter.state_dict(),
            "unverified": self.unverified,
            "device_time": dict(self.device_time.totals),
        }
        self.store.save(self.state.step, self._weights(), state=None if at_end else state, best=best)
        self.last_saved = time.monotonic()

    def _is_checkpoint_due(self) -> bool:
        every_seconds: float = self.parts.study.checkpoint.every_seconds
        return time.monotonic() - self.last_saved > every_seconds

    def _forget_setup_memory(self) -> None:
        """Reset the peak memory, so that loading and the check do not count."""
        release_free_memory(self.parts.device)
        reset_peak_memory(self.parts.device)

    # Steps

    def _after_step(self) -> Progress:
        """Report the progress and sample the device. Raises Preempted or Pruned if the trial is to end."""
        progress = self._progress()
        self.callbacks.on_progress(progress)
        self._stop_if_asked()
        if self.state.step % UTILIZATION_EVERY == 0:
            self.utilization.sample()
        if self.state.step % UTILIZATION_EVERY == 1 and (broken := self._broken_early()):
            raise Pruned(broken)
        return progress

    def _progress(self) -> Progress:
        state = self.state
        if state.step % CHECK_EVERY[self.parts.device.type] == 0:  # here, no read waits for the device
            if state.num_losses:
                self.train_loss = float(state.loss_sum) / state.num_losses
            self.examples_per_second = self.meter.summary()["train_examples_per_second"]
        return self._progress_in("training")

    def _progress_in(self, part: str, **more: Any) -> Progress:
        known = (self._budget_used(), self.train_loss, self.examples_per_second, self.store.write_seconds)
        best = self.best.values[0] if self.best else None
        return Progress(self.state.step, *known, part, self.num_steps, best, **more)

    def _enter(self, part: str, **more: Any) -> None:
        self.callbacks.on_progress(self._progress_in(part, **more))

    def _stop_if_asked(self) -> None:
        if self.callbacks.should_stop():
            raise Preempted(f"told to stop after step {self.state.step}; checkpointed.")

    def _end_early(self, step: int, budget_used: float, reason: str) -> None:
        """End the training before its budget is used up. The first reason stays."""
        if budget_used < 1 and not self.stopped_early:
            at = f"at step {step}, at {budget_used:.0%} of its budget"
            self.stopped_early = f"Training ended early {at}: {reason}."
            self.recorder.note(stopped_early=self.stopped_early)

    # Evaluations

    def _on_evaluation(self, evaluation: Evaluation) -> bool:
        """Report an evaluation and save the best weights. Returns whether the training ends early with it."""
        study, objective = self.parts.study, self.parts.study.objective[0]
        self._check_conditions()
        self.device_time.measure()
        self.recorder.note(device_time=(facts := self.device_time.facts()))
        if evaluation.examples_per_second is not None:
            self.evaluation_rates.append(evaluation.examples_per_second)
        kept = self._optimizer_facts()
        weights = sum(weight.nbytes for weight in self._weights().values())
        # The last weights and the best ones.
        self.recorder.note(optimizer_state=kept, checkpoint_bytes=2 * weights + kept["bytes"])
        rated = None if busy_text(facts) else evaluation  # a busy device may still become quiet
        broken = "" if evaluation.budget_used >= 1 else self._broken_early(rated)
        evaluation = replace(evaluation, values=self._values(evaluation))
        self.first_values.append(evaluation.values[0])
        if reason := patience_over(self.first_values, objective, study.evaluation):
            self._end_early(evaluation.step, evaluation.budget_used, reason)
        self._on_values(evaluation)
        evaluation = replace(evaluation, ends_trial=broken or self.stopped_early)
        self.last_evaluation = evaluation
        if evaluation.is_last and not broken:
            self._check_measured(evaluation)
        best_values = self.best.values if self.best else None
        better = not self.undefined and is_better(objective, evaluation.values, best_values)
        if better:
            self._set_best(evaluation)
        paused = None
        try:
            self.callbacks.on_evaluation(evaluation)
        except Paused as end:
            paused = end
        if better:
            # After the report, so that a resumed trial never lacks one.
            at_end = evaluation.budget_used >= 1 or bool(self.stopped_early)
            self._save(self._best_state(), at_end=at_end)
        if broken:
            raise Pruned(broken)
        if paused:
            raise paused
        return bool(self.stopped_early)

    def _set_best(self, evaluation: Evaluation) -> None:
        self.best = evaluation
        self.recorder.note(metrics=evaluation.metrics)
        if evaluation.source_metrics:
            self.recorder.note(source_metrics=evaluation.source_metrics)

    def _values(self, evaluation: Evaluation) -> tuple[float, ...]:
        study, metrics, measured = self.parts.study, evaluation.metrics, self._measured(evaluation)
        undefined = {name: undefined_metric(name, metrics, self.tasks) for name in study.named_metrics}
        self.undefined = next(filter(None, undefined.values()), "")
        return tuple(
            math.nan if undefined[one.metric] else objective_value(one.metric, metrics, self.tasks, measured)
            for one in study.objective
        )

    def _measured(self, evaluation: Evaluation) -> dict[str, float | None]:
        return {
            **evaluation.rates,
            "peak_memory_bytes": peak_memory_bytes(self.parts.device),
            "evaluation_examples_per_second": evaluation.examples_per_second,
        }

    def _check_measured(self, evaluation: Evaluation) -> None:
        """Raise Incompatible if, at the end of the training, a measured metric of the study has no value."""
        measured = self._measured(evaluation)
        for name in self.parts.study.named_metrics:
            if name in MEASURED_METRICS and measured[name] is None:
                why = self.energy_counter.missing if name == ENERGY and self.energy_counter else ""
                raise Incompatible(f"the metric {name} has no value: {why or TOO_SHORT}")

    def _broken_early(self, evaluation: Evaluation | None = None) -> str:
        """Return the limits that the trial certainly breaks; empty: none.

        Memory only grows. A speed is judged at an evaluation, when warm-up is a small part of it.
        """
        limits = self.parts.study.constraints
        known: dict[str, float | None] = {}
        if memory := limits.get("peak_memory_bytes"):
            known["peak_memory_bytes"] = max(peak_memory_bytes(self.parts.device), memory.min or 0)
        if evaluation and self.meter.totals().steps >= RATED_STEPS:
            known |= evaluation.rates
        if evaluation and len(self.evaluation_rates) > 1:
            known["evaluation_examples_per_second"] = float(np.median(self.evaluation_rates))
        return broken_limits(limits, known)

    # The end

    def _finish(self) -> tuple[float, ...]:
        if self.best is None:
            if not self.state.num_evaluations:
                raise Invalid("the training function has returned without a report: call `run.report`.")
            remedy = "Use another metric" if self.tasks else "Give it to `run.report`, or use another metric"
            raise Invalid(
                f"the metric {self.undefined} of an objective or a limit has no value in any evaluation. "
                f"{remedy}."
            )
        if self.stopped_early:  # in a step that was evaluated before
            self._check_measured(self.last_evaluation)
        if not self._keep_best(self.best):
            self.recorder.note(weights_lost=True)
        else:
            kept = best_checkpoint(self.store.folder)
            self.recorder.note(weights_digest=kept and bits_digest(kept.weights))
        return final_values(self.parts.study.objective, self.best.values, self.recorder.telemetry())
