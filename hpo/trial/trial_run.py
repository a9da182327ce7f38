"""One trial from its parts to its values: check -> prepare -> resume -> compile -> train -> finish."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpo.config.limits import ENERGY, MEASURED_METRICS, broken_limits
from hpo.config.trial_settings import BUDGETS
from hpo.data.tasks import Task
from hpo.device import EnergyCounter, Utilization
from hpo.errors import Incompatible, Invalid, Nonfinite, Paused, Preempted, Pruned
from hpo.memory import (
    is_out_of_memory,
    peak_memory_bytes,
    release_free_memory,
    reset_peak_memory,
)
from hpo.models.adapters import base_digest, base_facts, has_adapter, load_trained, trained_state
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags
from hpo.precision.compiled import observe_compiled
from hpo.precision.effective import Agreement, Observation, observe_model
from hpo.random_numbers import manual_seed
from hpo.training import distributed
from hpo.training.checkpoint import Checkpoint, CheckpointMirror, CheckpointStore, NoCheckpoints
from hpo.training.compilation import (
    compile_shapes,
    compiled_modules,
    run_both_modes,
)
from hpo.training.energy import MIN_STRETCH_SECONDS
from hpo.training.evaluate import Evaluation
from hpo.training.loop import CHECK_EVERY, Learner, TrainingHooks, train
from hpo.training.optim import optimizer_state_facts
from hpo.training.progress import CompileClock, ThroughputMeter, TrainingClock, TrainState
from hpo.trial.callbacks import Callbacks
from hpo.trial.compat import Compatibility, CompatibilityCache, check_compatibility, checked_on
from hpo.trial.objectives import final_values, is_better, objective_value, undefined_metric
from hpo.trial.telemetry import Progress, ScoredEvaluation, TrialRecorder, training_facts
from hpo.trial.trial_parts import TrialParts, training_args

CHECKPOINT_FORMAT = 10
"""To be raised when a checkpoint's state changes: a trial does not go on from another format's."""

UTILIZATION_EVERY = 20
"""Steps between two samples of the device's utilisation, and two looks at a limit of memory."""

RATED_STEPS = 13
"""Steps, those of the warm-up among them, before a limit of training speed may end a trial."""


def checkpoint_key(resume_key: str, parts: TrialParts) -> str:
    """What a checkpoint of the trial `resume_key` must have for it to go on from there."""
    shapes = [(name, tuple(weight.shape)) for name, weight in parts.model.state_dict().items()]
    used = hashlib.blake2b(repr(shapes).encode() + parts.used_ids.tobytes(), digest_size=8).hexdigest()
    precision = parts.resolution.effective
    code = "".join(f"/{sha}" for sha in parts.study.code.values())
    base = f"/{parts.resolution.base}/{base_digest(parts.model)}" if has_adapter(parts.model) else ""
    return f"{resume_key}/{CHECKPOINT_FORMAT}/{precision}/{parts.device.type}/{used}{code}{base}"


class TrialRun:
    """One running trial: its parts, its progress, and its checkpoints."""

    def __init__(
        self,
        parts: TrialParts,
        recorder: TrialRecorder,
        callbacks: Callbacks,
        cache: CompatibilityCache | None = None,
        energy_counter: EnergyCounter | None = None,
    ) -> None:
        self.parts = parts
        self.recorder = recorder
        self.callbacks = callbacks
        self.cache = cache
        self.energy_counter = energy_counter
        self.meter = ThroughputMeter(parts.device, counter=energy_counter)
        self.compile_clock = CompileClock()
        self.state = TrainState()
        self.evaluation_rates: list[float] = []
        self.best: ScoredEvaluation | None = None
        self.undefined = ""
        """The metric that the last evaluation lacks, though an objective or a limit needs it."""
        self.train_loss: float | None = None
        self.examples_per_second: float | None = None

    def run(
        self, folder: Path | None, resume_key: str, mirror: CheckpointMirror | None = None
    ) -> tuple[float, ...]:
        """Run the trial to its end and return its values; the arguments and errors are `Executor.run`'s."""
        parts, recorder, device = self.parts, self.recorder, self.parts.device
        # What is followed must not be of `self`, which would hold the model until garbage is collected.
        recorder.follow(lambda: {"peak_memory_bytes": peak_memory_bytes(device)})
        key = self._checkpoint_key(resume_key)
        checkpoints = NoCheckpoints() if folder is None else CheckpointStore(folder, key, mirror)
        recorder.follow(lambda: {"checkpoint_problems": list(checkpoints.problems)})
        precision, amp = parts.resolution.precision, parts.config.amp
        self.mixed_precision = MixedPrecision(precision, amp, device)
        with backend_flags(precision, amp), checkpoints as self.store:
            self._run()
            return distributed.decide(self._finish)

    def _run(self) -> None:
        """Check, prepare, resume and train."""
        parts = self.parts
        self.args = training_args(parts.study, parts.config, parts.data.train.num_windows)
        self.state.micro_batch_size = self.args.micro_batch_size
        self.base_digest = base_digest(parts.model)
        distributed.decide(lambda: self.judge(check_compatibility(parts, self.cache)))
        with distributed.memory_agreed("Search smaller encoders."):
            self.optimizer = parts.prepare()
        self._forget_setup_memory()
        self._resume()
        self._observe_and_compile()
        self.recorder.note(setup_seconds=time.perf_counter() - self.recorder.started)
        self._train()

    def _checkpoint_key(self, resume_key: str) -> str:
        return checkpoint_key(resume_key, self.parts)

    def _forget_setup_memory(self) -> None:
        """Begin to measure the peak memory: before this it is that of the check and of loading the model."""
        release_free_memory(self.parts.device)
        reset_peak_memory(self.parts.device)

    def judge(self, compatibility: Compatibility) -> None:
        """Record the check of the precision, and end the trial if that did not pass."""
        device = self.parts.device
        self.recorder.note(compatibility=compatibility.telemetry() | {"checked_on": checked_on(device)})
        for end in (Incompatible, Invalid):
            if compatibility.verdict == end.outcome:
                raise end(" ".join(compatibility.reasons))

    def _resume(self) -> None:
        """Go on from the trial's last checkpoint if there is one.

        The best weights may be newer, of an evaluation that will be made again: its value, which was
        reported before they were written, stays the trial's best until there is a better one.
        """
        # Rank 0 alone reads checkpoints, so that all go on from the same.
        best, last = distributed.decide(lambda: (self.store.best(), self.store.latest()))
        for best_state in [one.state["best"] for one in (best, last) if one and one.state["best"]]:
            # The best weights may be older, too, if newer ones could not be written.
            scored = ScoredEvaluation.from_state_dict(best_state)
            values = self.best.values if self.best else None
            if is_better(self.parts.study.objective[0], scored.values, values):
                self._set_best(scored)
        if last is None:
            return
        state = last.state
        self._load(last)
        self.mixed_precision.load_state_dict(state.get("mixed_precision", {}))
        self.state.load_state_dict(state["progress"])
        self.evaluation_rates = list(state["evaluation_rates"])
        self.meter.load_state_dict(state["meter"])
        self.recorder.note(resumed_from_step=self.state.step)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Take over the model and the optimizer of a checkpoint."""
        load_trained(self.parts.model, checkpoint.weights)
        self.optimizer.load_state_dict(checkpoint.state["optimizer"])

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the weights for a checkpoint."""
        return trained_state(self.parts.model)

    def _training_state(self) -> dict[str, Any]:
        """Return what a checkpoint to go on from holds beside the progress of the trial."""
        return {"optimizer": self.optimizer.state_dict()}

    def _observe_and_compile(self) -> None:
        parts = self.parts
        inputs = parts.batch(0, 1).to(self.parts.device.torch_device).inputs
        # Observed before the compiler hides the operators.
        seen = observe_model(parts.model, self.mixed_precision, lambda model: model(*inputs))
        if parts.compile is not None:
            self._compile(parts.compile)
            seen.compiled = self._observe_compiled(seen)
        self.note_observed(seen, compiled=bool(compiled_modules(parts.model)))
        if has_adapter(parts.model):
            self.recorder.note(base_precision=base_facts(parts.model, parts.resolution.precision))

    def note_observed(self, seen: Observation, *, compiled: bool = False) -> Agreement:
        """Record in which precision the model was seen to compute."""
        resolution = self.parts.resolution
        agrees, reason = agreement = seen.agreement(resolution.precision)
        observed = {
            "observed": seen.telemetry(compiled=compiled),
            "agrees": agrees,
            "reason": " ".join(filter(None, (resolution.reason, reason))),
            "observed_reason": reason,  # without that of a fallback
        }
        self.recorder.note(precision=asdict(resolution) | observed)
        return agreement

    def _compile(self, apply: Callable[[MultitaskModel], object]) -> None:
        parts, clock = self.parts, self.compile_clock
        started = time.perf_counter()
        apply(parts.model)
        compile_shapes(parts.model, parts.loss_fn, parts.batch, self.mixed_precision, self.state)
        seconds = time.perf_counter() - started
        self.recorder.follow(lambda: {"compile_seconds": seconds + clock.seconds})
        clock.start()

    def _observe_compiled(self, seen: Observation) -> Agreement:
        parts, mixed_precision = self.parts, self.mixed_precision
        batch = parts.batch(self.state.micro_batch_size)  # of a shape that is compiled already

        def step() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            manual_seed(0)
            return run_both_modes(parts.model, parts.loss_fn, batch, mixed_precision)

        try:
            return observe_compiled(parts.model, step, parts.resolution.precision, seen)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        parts.model.zero_grad(set_to_none=True)
        release_free_memory(parts.device)
        return Agreement(None, "compiled, too little memory is left to compare passes.")

    def _train(self) -> None:
        parts, mixed_precision, num_ranks = self.parts, self.mixed_precision, distributed.world_size()
        clock = TrainingClock(self.state, self.meter, self.compile_clock)
        self.utilization = Utilization(parts.device, torch.get_num_threads())
        measured = (parts.model, mixed_precision, clock, self.utilization, self.evaluation_rates)
        self.recorder.follow(lambda: training_facts(*measured, num_ranks))
        self.last_saved = time.monotonic()
        # Between micro-batches it would leave other ranks waiting.
        hooks = TrainingHooks(self._on_step, self._stop_if_told if num_ranks == 1 else lambda: None)
        evaluations = train(
            Learner(parts.model, parts.loss_fn, mixed_precision),
            self.optimizer,
            parts.data,
            self.args,
            clock,
            hooks,
        )
        try:
            for evaluation in evaluations:
                distributed.decide(partial(self._on_evaluation, evaluation))
        except Nonfinite as end:
            self.recorder.note(finite_in_fp32=end.finite_in_fp32)
            raise
        except (Preempted, Paused) as end:
            self._save()
            if isinstance(end, Paused):
                self.store.share()
            raise

    def _stop_if_told(self) -> None:
        if self.callbacks.should_stop():
            raise Preempted(f"told to stop after step {self.state.step}; checkpointed.")

    def _on_step(self) -> bool:
        self._after_step()
        due = time.monotonic() - self.last_saved > self.parts.study.checkpoint.every_seconds
        if due:
            self.meter.stop()
            self._save()
        return due

    def _after_step(self) -> None:
        """Tell the progress, sample the device, and stop the trial where that is due."""
        self.callbacks.on_progress(self._progress())
        self._stop_if_told()
        if self.state.step % UTILIZATION_EVERY == 0:
            self.utilization.sample()
        if self.state.step % UTILIZATION_EVERY == 1 and (told := self._broken_early()):
            raise Pruned(told)

    def _progress(self) -> Progress:
        state = self.state
        if state.step % CHECK_EVERY[self.parts.device.type] == 0:  # after which no value is waited for
            if state.num_losses:
                self.train_loss = float(state.loss_sum) / state.num_losses
            self.examples_per_second = self.meter.summary()["train_examples_per_second"]
        used = self._budget_used()
        return Progress(state.step, used, self.train_loss, self.examples_per_second, self.store.write_seconds)

    def _budget_used(self) -> float:
        return self.args.budget.used(self.state)

    def _on_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.examples_per_second is not None:
            self.evaluation_rates.append(evaluation.examples_per_second)
        kept = self._optimizer_facts()
        weights = sum(weight.nbytes for weight in self._weights().values())
        # Those to continue from and the best ones.
        self.recorder.note(optimizer_state=kept, checkpoint_bytes=2 * weights + kept["bytes"])
        broken = "" if evaluation.budget_used >= 1 else self._broken_early(evaluation)
        scored = ScoredEvaluation(evaluation, self._values(evaluation), broken)
        best_values = self.best.values if self.best else None
        objective = self.parts.study.objective[0]
        better = not self.undefined and is_better(objective, scored.values, best_values)
        if better:
            self._set_best(scored)
        paused = None
        try:
            self.callbacks.on_evaluation(scored)
        except Paused as told:
            paused = told
        if better:
            # After the report: a trial never goes on from behind one that was not made.
            self._save(self._best_state(scored), at_end=evaluation.budget_used >= 1)
        if broken:
            raise Pruned(broken)
        if paused:
            raise paused

    def _optimizer_facts(self) -> dict[str, Any]:
        return optimizer_state_facts(self.optimizer, self.parts.config.optimizer_state)

    def _best_state(self, scored: ScoredEvaluation) -> dict[str, Any]:
        """Return the state that is kept beside the weights of the best evaluation."""
        effective = self.parts.resolution.effective
        return {"precision": effective, "base_digest": self.base_digest, "best": asdict(scored)}

    def _broken_early(self, evaluation: Evaluation | None = None) -> str:
        """Which limits the trial breaks, of those that it can be known of before its end; empty: none.

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

    def _values(self, evaluation: Evaluation) -> tuple[float, ...]:
        measured = {
            **evaluation.rates,
            "peak_memory_bytes": peak_memory_bytes(self.parts.device),
            "evaluation_examples_per_second": evaluation.examples_per_second,
        }
        study = self.parts.study
        metrics = [objective.metric for objective in study.objective]
        named = [*metrics, *study.constraints]
        unmeasured = [name for name in named if name in MEASURED_METRICS and measured.get(name) is None]
        if unmeasured and evaluation.budget_used >= 1:
            why = self._why_unmeasured(unmeasured[0], evaluation)
            raise Incompatible(f"the metric {unmeasured[0]} has no value: {why}")
        tasks, found = self._tasks(), evaluation.metrics
        undefined = {name: undefined_metric(name, found, tasks) for name in named}
        self.undefined = next(filter(None, undefined.values()), "")
        return tuple(
            math.nan if undefined[name] else objective_value(name, found, tasks, measured) for name in metrics
        )

    def _tasks(self) -> Sequence[Task]:
        return self.parts.loss_fn.tasks

    def _why_unmeasured(self, metric: str, evaluation: Evaluation) -> str:
        """Return the reason why a measured metric has no value at the end of the trial."""
        config = self.parts.config
        budget = next(name for name in BUDGETS if getattr(config, name) is not None)
        if metric != ENERGY:
            return (
                f"something was compiled in every step of the trial ({evaluation.step} in all), so that none "
                f"tells the speed. Raise `{budget}`, or use `compile: none`."
            )
        missing = self.energy_counter and self.energy_counter.missing
        return missing or (
            f"after the warm-up, no stretch of steps without an evaluation, a checkpoint or a "
            f"compilation lasted {MIN_STRETCH_SECONDS:g} s. Raise `{budget}`, or evaluate less often."
        )

    def _why_undefined(self) -> str:
        """Return the reason why no evaluation had a value of each objective and limit."""
        return (
            f"the metric {self.undefined} is not defined for the predictions of any evaluation, but an "
            "objective or a limit needs it. Use another metric, or return a number there."
        )

    def _set_best(self, scored: ScoredEvaluation) -> None:
        self.best = scored
        self.recorder.note(metrics=scored.evaluation.metrics)

    def _save(self, best: Mapping[str, Any] | None = None, *, at_end: bool = False) -> None:
        """Write a checkpoint. At the end of the budget there is nothing to go on to, so no state either.

        Raises Nonfinite if the training cannot recover: going on from the checkpoint must not forget that.
        """
        self.mixed_precision.check()
        state = {
            "progress": self.state.state_dict(),
            **self._training_state(),
            "mixed_precision": self.mixed_precision.state_dict(),
            "best": self.best and asdict(self.best),
            "evaluation_rates": self.evaluation_rates,
            "meter": self.meter.state_dict(),
        }
        self.store.save(
            self.state.step,
            self._weights(),
            state=None if at_end else state,
            best=best,
        )
        self.last_saved = time.monotonic()

    def _finish(self) -> tuple[float, ...]:
        if self.best is None:
            raise Invalid(self._why_undefined())
        if not self._keep_best(self.best):
            self.recorder.note(weights_lost=True)
        return final_values(self.parts.study.objective, self.best.values, self.recorder.telemetry())

    def _keep_best(self, best: ScoredEvaluation) -> bool:
        """Keep the checkpoints of a trial that has ended. Returns whether its best weights are there."""
        return self.store.finish(best.evaluation.step)
