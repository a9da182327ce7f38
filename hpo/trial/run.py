"""One trial from its parts to its values: check -> prepare -> resume -> compile -> train -> finish."""

import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpo.config.trial_settings import AUTO
from hpo.device import EnergyCounter, Utilization
from hpo.errors import Nonfinite, Paused, Preempted
from hpo.memory import is_out_of_memory, release_free_memory
from hpo.models.adapters import base_digest, base_facts, has_adapter, load_trained, trained_state
from hpo.models.model_parts import part_facts
from hpo.models.multitask import MultitaskModel
from hpo.outcome import Progress
from hpo.precision.compiled import observe_compiled
from hpo.precision.effective import observe_model
from hpo.precision.observation import Agreement, Observation
from hpo.random_numbers import manual_seed
from hpo.training import distributed
from hpo.training.checkpoint import Checkpoint, CheckpointMirror
from hpo.training.compilation import compile_shapes, run_both_modes
from hpo.training.evaluate import Evaluation
from hpo.training.loop import AfterStep, Learner, TrainingHooks, train
from hpo.training.optim import optimizer_state_facts
from hpo.training.throughput import TrainingClock
from hpo.trial.base_run import CHECKPOINT_FORMAT, BaseRun
from hpo.trial.compat import CompatibilityCache, check_compatibility
from hpo.trial.part_search import find_parts
from hpo.trial.parts import TrialParts, training_args
from hpo.trial.telemetry import Callbacks, TrialRecorder, training_facts
from hpo.trial.user_callbacks import UserCallbacks


def checkpoint_key(resume_key: str, parts: TrialParts) -> str:
    """Return the key that a checkpoint of the trial `resume_key` must have for a resume."""
    shapes = [(name, tuple(weight.shape)) for name, weight in parts.model.state_dict().items()]
    used = hashlib.blake2b(repr(shapes).encode() + parts.used_ids.tobytes(), digest_size=8).hexdigest()
    code = "".join(f"/{sha}" for sha in parts.study.code.values())
    code += "".join(f"/{part}" for part in parts.config.fp32_parts)
    base = f"/{parts.resolution.base}/{base_digest(parts.model)}" if has_adapter(parts.model) else ""
    precision, device = parts.resolution.effective, parts.device.type
    return f"{resume_key}/{CHECKPOINT_FORMAT}/{precision}/{device}/{used}{code}{base}"


class TrialRun(BaseRun):
    """One running trial with the training loop of this package."""

    parts: TrialParts
    optimizer: torch.optim.Optimizer
    user_callbacks: UserCallbacks

    def __init__(
        self,
        parts: TrialParts,
        recorder: TrialRecorder,
        callbacks: Callbacks,
        cache: CompatibilityCache | None = None,
        energy_counter: EnergyCounter | None = None,
    ) -> None:
        super().__init__(parts, recorder, callbacks, energy_counter)
        self.cache = cache
        self.tasks = parts.loss_fn.tasks
        self.args = training_args(parts.study, parts.config, parts.data.train.num_windows)
        self.state.micro_batch_size = self.args.micro_batch_size
        self.num_steps = self.args.budget.max_steps

    def run(
        self, folder: Path | None, resume_key: str, mirror: CheckpointMirror | None = None
    ) -> tuple[float, ...]:
        no_parts = self._find_float32_parts()
        parts = self.parts
        self.base_digest = base_digest(parts.model)
        with self.checkpoints(folder, checkpoint_key(resume_key, parts), mirror):
            distributed.decide(lambda: self.judge(check_compatibility(parts, self.cache), *no_parts))
            with distributed.memory_agreed("Search smaller encoders."):
                self.optimizer = parts.prepare()
            self._forget_setup_memory()
            self._resume()
            self._observe_and_compile()
            self.user_callbacks = UserCallbacks(parts.config, parts.study.code, parts.model, self.state)
            distributed.decide(self.user_callbacks.make)
            self.recorder.note(setup_seconds=time.perf_counter() - self.recorder.started)
            self._train()
            distributed.decide(partial(self.user_callbacks.call, "on_end", outcome="complete"))
            return distributed.decide(self._finish)

    def _find_float32_parts(self) -> tuple[str, ...]:
        """Resolve and record `fp32_parts`. Returns the reason if `auto` found nothing that helps."""
        requested = self.parts.config.fp32_parts
        if requested != AUTO:
            if requested:
                self.recorder.note(fp32_parts={"requested": requested, "resolved": requested})
            return ()
        result = distributed.decide(lambda: find_parts(self.parts, self.cache, self._stop_if_asked))
        self.parts = self.parts.with_float32_parts(result.parts)
        self.recorder.note(fp32_parts=result.telemetry())
        return (result.reason,) if result.reason else ()

    def _observe_and_compile(self) -> None:
        parts, resolution = self.parts, self.parts.resolution
        # A GPU chooses kernels by size. Batch norms need two rows.
        batch = parts.batch(2, 0) if parts.device.type == "cpu" else parts.batch(1, 1)
        inputs = batch.to(parts.device.torch_device).inputs
        # Observed before the compiler hides the operators.
        seen = observe_model(parts.model, self.mixed_precision, lambda model: model(*inputs))
        if parts.compile is not None:
            self._compile(parts.compile)
            seen.compiled = self._observe_compiled(seen)
        self.observed(parts.model, seen)
        if parts_noted := self.recorder.telemetry().get("fp32_parts"):
            names = parts.config.fp32_parts
            by_part = part_facts(parts.model, names, seen, resolution.precision)
            self.recorder.note(fp32_parts=parts_noted | {"by_part": by_part})
        if has_adapter(parts.model):
            self.recorder.note(base_precision=base_facts(parts.model, resolution.precision))

    def _compile(self, apply: Callable[[MultitaskModel], object]) -> None:
        parts, clock = self.parts, self.compile_clock
        self._enter("compile")
        started = time.perf_counter()
        apply(parts.model)
        compile_shapes(parts.model, parts.loss_fn, parts.batch, self.mixed_precision, self.state)
        seconds = time.perf_counter() - started
        self.recorder.follow(
            lambda: {"compile_seconds": seconds + clock.seconds, "late_compile_seconds": clock.seconds}
        )
        clock.start()

    def _observe_compiled(self, seen: Observation) -> Agreement:
        parts, mixed_precision = self.parts, self.mixed_precision
        batch = parts.batch(self.state.micro_batch_size)  # its shape is compiled already

        def step() -> tuple[list[Tensor], list[Tensor]]:
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
        self._follow_training(clock, num_ranks)
        self.last_saved = time.monotonic()
        # Between micro-batches it would leave other ranks waiting.
        stop = self._stop_if_asked if num_ranks == 1 else lambda: None
        hooks = TrainingHooks(self._on_step, stop, partial(self._on_evaluation_batch, stop))
        learner = Learner(parts.model, parts.loss_fn, mixed_precision)
        self._enter("training")
        evaluations = train(learner, self.optimizer, parts.data, self.args, clock, hooks)
        with self.user_callbacks.told_of_error():
            try:
                for evaluation in evaluations:
                    if distributed.decide(partial(self._on_evaluation, evaluation)):
                        break
            except Nonfinite as end:
                self.recorder.note(finite_in_fp32=end.finite_in_fp32)
                raise
            except (Preempted, Paused) as end:
                self._save()
                if isinstance(end, Paused):
                    self.store.share()
                raise

    def _follow_training(self, clock: TrainingClock, num_ranks: int) -> None:
        """Have the record follow the training. Its functions must not refer to `self`."""
        parts, state, data = self.parts, self.state, self.parts.data
        self.utilization = Utilization(parts.device, torch.get_num_threads())
        measured = (parts.model, self.mixed_precision, clock, self.utilization, self.evaluation_rates)
        self.recorder.follow(lambda: training_facts(*measured, num_ranks))
        if self.user_callbacks:
            self.recorder.follow(lambda: {"callback_seconds": state.callback_seconds})
        self.recorder.follow(partial(data.drawn_shares, self.args.batch_size, self.args.seed, state))

    def _on_step(self) -> AfterStep:
        progress = self._after_step()
        watched = self.user_callbacks.watch_steps
        if watched and self._call("on_step", progress):
            return "ended"
        due = self._is_checkpoint_due()
        if due:
            self.meter.stop()
            self._save()
        return "interrupted" if due or watched else ""

    def _on_evaluation_batch(self, stop: Callable[[], None], done: float) -> None:
        stop()
        split = self.parts.data.validation
        self._enter(
            "evaluation", part_done=done, num_texts=len(split.examples), num_windows=split.num_windows
        )

    def _call(self, method: str, progress: Progress, **changes: Any) -> bool:
        """Call the study's own callbacks. Returns whether one of them ends the training."""
        self.meter.stop()
        reason = self.user_callbacks.call(
            method,
            step=progress.step,
            budget_used=progress.budget_used,
            train_loss=progress.train_loss,
            examples_per_second=progress.examples_per_second,
            **changes,
        )
        if reason:
            self._end_early(progress.step, progress.budget_used, reason)
        return bool(reason)

    def _on_values(self, evaluation: Evaluation) -> None:
        if self.user_callbacks:
            rate = evaluation.rates.get("train_examples_per_second")
            progress = Progress(evaluation.step, evaluation.budget_used, evaluation.train_loss, rate)
            self._call("on_evaluation", progress, metrics=evaluation.metrics, values=evaluation.values)

    def _load(self, checkpoint: Checkpoint) -> None:
        load_trained(self.parts.model, checkpoint.weights)
        self.optimizer.load_state_dict(checkpoint.state["optimizer"])

    def _weights(self) -> dict[str, Tensor]:
        return trained_state(self.parts.model)

    def _training_state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def _best_state(self) -> dict[str, Any]:
        own = {"base_digest": self.base_digest, "fp32_parts": self.parts.config.fp32_parts}
        return super()._best_state() | own

    def _budget_used(self) -> float:
        return self.args.budget.used(self.state)

    def _optimizer_facts(self) -> dict[str, Any]:
        return optimizer_state_facts(self.optimizer, self.parts.config.optimizer_state)
