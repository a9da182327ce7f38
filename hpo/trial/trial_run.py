"""One trial from its parts to its values: check -> set up -> resume -> compile -> train -> finish."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from hpo.config.search_space import is_searched
from hpo.config.study_config import DEPLOYED_METRICS, MEASURED_METRICS
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.config.trial_settings import BUDGETS, STEP_SETTINGS
from hpo.device import DeviceInfo, Utilization
from hpo.errors import Incompatible, InputError, Preempted
from hpo.memory import peak_memory_bytes, release_free_memory, reset_peak_memory
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision, backend_flags
from hpo.precision.compiled import observe_compiled
from hpo.precision.effective import observe_model
from hpo.precision.environment import environment_overrides, refuse_overrides, uses_of_float32
from hpo.precision.parts import float32_modules
from hpo.precision.table import Resolution, resolve, support
from hpo.random_numbers import manual_seed
from hpo.training.checkpoint import CheckpointMirror, CheckpointStore, NoCheckpoints
from hpo.training.compilation import (
    RECOMPILE_LIMIT,
    CompileClock,
    compiled_modules,
    run_both_modes,
    run_compiled_shapes,
)
from hpo.training.distributed import Ranks
from hpo.training.evaluate import Evaluation
from hpo.training.loop import TrainingClock, TrainingData, TrainState, train
from hpo.training.losses import check_loss
from hpo.training.optim import rounding_of
from hpo.training.throughput import ThroughputMeter
from hpo.trial.compat import check_compatibility, checked_on
from hpo.trial.objectives import final_values, is_better, objective_value
from hpo.trial.telemetry import ScoredEvaluation, TrialRecorder, training_facts

if TYPE_CHECKING:
    from hpo.trial.executor import Executor

CHECKPOINT_FORMAT = 4
"""To be raised when a checkpoint's state changes: a trial does not go on from another format's."""

UTILIZATION_EVERY = 20
"""Steps between two samples of the device's utilisation."""


def checkpoint_key(
    resume_key: str,
    config: TrialConfig,
    resolution: Resolution,
    device: DeviceInfo,
    used_ids: NDArray[Any],
) -> str:
    """What a checkpoint of the trial `resume_key` must have for it to go on from there."""
    used = hashlib.blake2b(used_ids.tobytes(), digest_size=8).hexdigest()
    precision = "+".join([resolution.effective, *config.float32_parts])
    return f"{resume_key}/{CHECKPOINT_FORMAT}/{precision}/{device.type}/{used}"


def check_overrides(config: TrialConfig, resolution: Resolution) -> None:
    """Raise Incompatible where parts that are to be fp32 would not be."""
    if config.float32_parts and resolution.precision.tf32:
        raise Incompatible(
            f"precision_overrides.{config.float32_parts[0]}: a part is in fp32 by leaving autocast, and "
            f"`{resolution.effective}` has none: its products would be TF32. Search it `when: "
            "{fp_precision: [bf16, fp16]}`."
        )


class RanksPeakMemory:
    """The largest peak of the memory of any rank, of the others as of their last evaluation."""

    def __init__(self, device: DeviceInfo, ranks: Ranks) -> None:
        self._device = device
        self._ranks = ranks
        self._of_all = 0

    def ask_all(self) -> None:
        """To be called by all ranks."""
        self._of_all = max(int(peak) for (peak,) in self._ranks.gather(peak_memory_bytes(self._device)))

    def read(self) -> int:
        return max(self._of_all, peak_memory_bytes(self._device))


class TrialRun:
    """One running trial: its parts, its progress, and its checkpoints."""

    def __init__(
        self,
        executor: Executor,
        recorder: TrialRecorder,
        on_evaluation: Callable[[ScoredEvaluation], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.executor = executor
        self.recorder = recorder
        self.on_evaluation = on_evaluation
        self.should_stop = should_stop
        self.meter = ThroughputMeter(executor.device)
        self.compile_clock = CompileClock()
        self.state = TrainState()
        self.evaluation_rates: list[float] = []
        self.best: ScoredEvaluation | None = None
        self.peak_memory = RanksPeakMemory(executor.device, executor.ranks)

    def run(
        self,
        params: Mapping[str, Any],
        folder: Path | None,
        resume_key: str,
        mirror: CheckpointMirror | None = None,
    ) -> tuple[float, ...]:
        """Run the trial to its end and return its values; the arguments and errors are `Executor.run`'s."""
        executor, recorder = self.executor, self.recorder
        config = build_trial_config(executor.study, params, executor.default_precision, executor.amp)
        check_loss(executor.tasks, config.loss)
        fingerprint = executor.dataset.fingerprint
        executor.ranks.start_trial(executor.device, fingerprint, compiles=config.compile != "none")
        requested = config.fp_precision
        level = support(requested, executor.device).level
        recorder.note(precision={"requested": requested, "effective": None, "support": level})
        resolution = resolve(requested, executor.device, config.amp)
        recorder.note(precision=asdict(resolution), environment=environment_overrides())
        needs_float32 = uses_of_float32(
            check=executor.study.compat.enabled,
            parts=bool(config.float32_parts),
            fallback=bool(config.amp.fallback_to_fp32),
        )
        precisions = [resolution.effective]
        refuse_overrides(precisions, config.amp, executor.device.type, float32_for=needs_float32)
        check_overrides(config, resolution)
        reset_peak_memory(executor.device)
        peak_memory = self.peak_memory
        recorder.follow(lambda: {"peak_memory_bytes": peak_memory.read()})
        used_ids = executor.used_ids(config)
        key = checkpoint_key(resume_key, config, resolution, executor.device, used_ids)
        checkpoints = NoCheckpoints() if folder is None else CheckpointStore(folder, key, mirror)
        recorder.follow(lambda: {"checkpoint_problems": list(checkpoints.problems)})
        with backend_flags(resolution.precision, config.amp), checkpoints as self.store:
            self.parts = executor.parts(config, resolution)
            split = self.parts.train_split
            recorder.note(
                data={
                    "num_examples": len(split.examples),
                    "splits": {name: len(rows) for name, rows in executor.dataset.splits.items()},
                    "num_cut_examples": split.num_cut_examples,
                    "num_lost_spans": dict(split.num_lost_spans),
                }
            )
            if executor.ranks.is_main:
                self._check()
            self.optimizer = executor.prepare(self.parts.model, resolution.precision, config, used_ids)
            recorder.note(weight_rounding=rounding_of(self.optimizer))
            self.mixed_precision = MixedPrecision(resolution.precision, config.amp, executor.device)
            self._resume()
            self._observe_and_compile()
            recorder.note(setup_seconds=time.perf_counter() - recorder.started)
            self._train()
            return self._finish()

    def _check(self) -> None:
        executor = self.executor
        fingerprint = executor.dataset.fingerprint
        found = check_compatibility(self.parts, executor.study, fingerprint, executor.device, executor.cache)
        speaks_for = {"checked_on": checked_on(executor.device)}
        self.recorder.note(compatibility=found.telemetry() | speaks_for)
        if found.verdict == "incompatible":
            raise Incompatible(" ".join(found.reasons))
        # The check's passes are not this trial's memory.
        release_free_memory(executor.device)
        reset_peak_memory(executor.device)

    def _resume(self) -> None:
        """Go on from the trial's last checkpoint if there is one.

        The best weights may be newer, of an evaluation that will be made again: its value, which was
        reported before they were written, stays the trial's best until there is a better one.
        """
        shapes = {name: value.shape for name, value in self.parts.model.state_dict().items()}
        best, last = self.store.best(shapes), self.store.latest(shapes)
        if last is not None:
            self.parts.model.load_state_dict(last.weights)
        # Rank 0 alone reads checkpoints, so that all go on from the same.
        ranks = self.executor.ranks
        ranks.copy_from_main(self.parts.model)
        found = [one.state["best"] for one in (best, last) if one]
        found, state = ranks.broadcast((found, last.state if last else None))
        for best_state in filter(None, found):
            # The best weights may be older, too, if newer ones could not be written.
            scored = ScoredEvaluation.from_state_dict(best_state)
            values = self.best.values if self.best else None
            if is_better(self.executor.study.objective[0], scored.values, values):
                self._set_best(scored)
        if state is None:
            return
        self.optimizer.load_state_dict(state["optimizer"])
        self.mixed_precision.load_state_dict(state["mixed_precision"])
        self.state.load_state_dict(state["progress"])
        self.evaluation_rates = list(state["evaluation_rates"])
        self.meter.load_state_dict(state["meter"])
        self.recorder.note(resumed_from_step=self.state.step)

    def _observe_and_compile(self) -> None:
        parts, resolution = self.parts, self.parts.resolution
        batch = parts.batch(0, 1).to(self.executor.device.torch_device)
        inputs = (batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL)
        # Observed before the compiler hides the modules.
        seen = observe_model(parts.model, self.mixed_precision, *inputs)
        if parts.compile is not None:
            self._compile(parts.compile)
            seen.compiled = self._observe_compiled()
        disagreement = seen.disagreement(resolution.precision, float32_modules(parts.model))
        observed = {
            "float32_parts": parts.config.float32_parts,
            "observed": seen.telemetry(compiled=bool(compiled_modules(parts.model))),
            "agrees": not disagreement,
            "reason": " ".join(filter(None, (resolution.reason, disagreement, seen.unmeasured()))),
        }
        self.recorder.note(precision=asdict(resolution) | observed)

    def _compile(self, apply: Callable[[MultitaskModel], object]) -> None:
        parts, clock = self.parts, self.compile_clock
        started = time.perf_counter()
        torch._dynamo.reset()  # graphs of earlier trials would count towards its limit of recompilations
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        apply(parts.model)
        # Two lengths, so that the compiler finds out which dimensions are dynamic.
        batches = [parts.batch(0, parts.config.batch_size), parts.batch(parts.config.batch_size)]
        run_compiled_shapes(parts.model, parts.loss_fn, batches, self.mixed_precision)
        seconds = time.perf_counter() - started
        self.recorder.follow(lambda: {"compile_seconds": seconds + clock.seconds})
        clock.start()

    def _observe_compiled(self) -> str:
        parts, mixed_precision = self.parts, self.mixed_precision
        batch = parts.batch(parts.config.batch_size)  # of a shape that is compiled already

        def step() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            manual_seed(0)
            return run_both_modes(parts.model, parts.loss_fn, batch, mixed_precision)

        in_float32 = float32_modules(parts.model)
        return observe_compiled(parts.model, step, parts.resolution.precision, in_float32)

    def _train(self) -> None:
        parts, mixed_precision, state, meter = self.parts, self.mixed_precision, self.state, self.meter
        self.utilization = Utilization(self.executor.device, torch.get_num_threads())
        measured = (parts.model, mixed_precision, state, meter, self.utilization, self.evaluation_rates)
        num_ranks = self.executor.ranks.world_size
        self.recorder.follow(lambda: training_facts(*measured, num_ranks))
        self.last_saved = time.monotonic()
        evaluations = train(
            parts.model,
            self.optimizer,
            parts.loss_fn,
            mixed_precision,
            TrainingData(parts.train_split, parts.validation_split, parts.pad_id),
            self.executor.training_args(parts.config),
            TrainingClock(state, meter, self.compile_clock),
            self._on_step,
            self._stop_if_told,
        )
        try:
            for evaluation in evaluations:
                self._on_evaluation(evaluation)
        except Preempted:
            self._save()
            raise

    def _stop_if_told(self) -> None:
        if self.should_stop():
            raise Preempted(f"told to stop after step {self.state.step}; checkpointed.")

    def _on_step(self) -> bool:
        self.executor.checkpoint_seconds = self.store.write_seconds
        self._stop_if_told()
        if self.state.step % UTILIZATION_EVERY == 0:
            self.utilization.sample()
        due = time.monotonic() - self.last_saved > self.executor.study.checkpoint.every_seconds
        if due:
            self._save()
        return due

    def _on_evaluation(self, evaluation: Evaluation) -> None:
        self.peak_memory.ask_all()
        self.evaluation_rates.append(evaluation.examples_per_second)
        scored = ScoredEvaluation(evaluation, self._values(evaluation))
        best_values = self.best.values if self.best else None
        better = is_better(self.executor.study.objective[0], scored.values, best_values)
        if better:
            self._set_best(scored)
        self.on_evaluation(scored)
        if better:
            # After the report: a trial never goes on from behind one that was not made.
            best = {
                "config": self.parts.config.model_dump_json(),
                "precision": self.parts.resolution.effective,
                "best": scored.state_dict(),
            }
            self._save(best, at_end=evaluation.budget_used >= 1)

    def _values(self, evaluation: Evaluation) -> tuple[float, ...]:
        measured = {
            **evaluation.rates,
            "peak_memory_bytes": self.peak_memory.read(),
            "evaluation_examples_per_second": evaluation.examples_per_second,
        }
        study, config = self.executor.study, self.parts.config
        metrics = [objective.metric for objective in study.objective]
        while_training = set(MEASURED_METRICS) - set(DEPLOYED_METRICS)
        unmeasured = [name for name in metrics if name in while_training and measured.get(name) is None]
        if unmeasured and evaluation.budget_used >= 1:
            # As with a model that cannot be built: it may be this trial's settings alone.
            searched = is_searched(study.search_space, STEP_SETTINGS)
            budget = next(name for name in BUDGETS if getattr(config, name) is not None)
            raise (Incompatible if searched else InputError)(
                f"the objective {unmeasured[0]} has no value: something was compiled in every step of the "
                f"trial ({evaluation.step} in all), so that none tells the speed. Raise `{budget}`, or use "
                "`compile: none`."
            )
        tasks = self.executor.tasks
        return tuple(objective_value(name, evaluation.metrics, tasks, measured) for name in metrics)

    def _set_best(self, scored: ScoredEvaluation) -> None:
        self.best = scored
        self.recorder.note(metrics=scored.evaluation.metrics)

    def _save(self, best: Mapping[str, Any] | None = None, *, at_end: bool = False) -> None:
        """Write a checkpoint. At the end of the budget there is nothing to go on to, so no state either."""
        state = {
            "progress": self.state.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mixed_precision": self.mixed_precision.state_dict(),
            "best": self.best and self.best.state_dict(),
            "evaluation_rates": self.evaluation_rates,
            "meter": self.meter.state_dict(),
        }
        self.store.save(
            self.state.step,
            self.parts.model.state_dict(),
            state=None if at_end else state,
            best=best,
            copy=not at_end,
        )
        self.last_saved = time.monotonic()

    def _finish(self) -> tuple[float, ...]:
        assert self.best is not None
        self.store.finish(self.best.evaluation.step)
        return final_values(self.executor.study.objective, self.best.values, self.recorder.telemetry())
