"""One trial, from its configuration to its outcome: the only place that unpacks a TrialConfig.

    resolve precision -> tokens -> model -> compatibility check -> train / evaluate -> TrialResult

What cannot work is found out in this order because it is the order of cost: an unsupported precision
takes milliseconds, a cached compatibility verdict one query. Every way a trial can end becomes a
`TrialResult`; only what concerns the whole study (bad data, a full disk, a lost lease) is raised.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from hpo.config.search_space import is_searched
from hpo.config.study_config import MEASURED_METRICS, StudyConfig
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.config.trial_settings import BUDGETS
from hpo.data.batches import collate
from hpo.data.dataset import DataSet, load_data
from hpo.data.token_cache import load_tokenized
from hpo.data.tokenized_split import LENGTH_MULTIPLE, TokenizedSplit, Windowing
from hpo.device import DeviceInfo, Utilization, synchronize
from hpo.errors import (
    Incompatible,
    InputError,
    ModelError,
    OutOfMemory,
    Preempted,
    RunError,
    TrialEnd,
    did_you_mean,
)
from hpo.json_safe import json_safe
from hpo.memory import disable_malloc_trim, gc_collect, is_out_of_memory, release_free_memory
from hpo.models.compact_embedding import compact_vocabulary
from hpo.models.encoder import load_tokenizer
from hpo.models.multitask import MultitaskModel, build_model
from hpo.outcome import Outcome
from hpo.precision.amp import MixedPrecision, backend_flags, observe, prepare_model
from hpo.precision.table import PRECISIONS, Precision, Resolution, apply_preset, resolve, support
from hpo.precision.weight_copies import keep_reduced_weights
from hpo.training.checkpoint import CheckpointStore, NoCheckpoints
from hpo.training.compilation import apply_compile, compiled_modules
from hpo.training.evaluate import Evaluation
from hpo.training.loop import Budget, TrainingArgs, TrainState, train
from hpo.training.losses import LossOptions, MultitaskLoss, check_loss, class_weights
from hpo.training.optim import build_optimizer, parameter_groups, reads_short_gradients
from hpo.training.throughput import ThroughputMeter, training_flops
from hpo.trial.compat import Compatibility, Measurement, judge, measure
from hpo.trial.objectives import check_metric, decision_metrics, objective_value
from hpo.trial.telemetry import ScoredEvaluation, TrialRecorder, TrialResult

CHECKPOINT_FORMAT = 2
"""To be raised when a checkpoint's state changes: a trial does not go on from another format's."""

UTILIZATION_EVERY = 20
"""Steps between two questions to the device how busy it is."""

_MODEL_SETTINGS = (
    "encoder",
    "attention",
    "freeze_layers",
    "max_length",
    "dropout",
    "attention_dropout",
    "gradient_checkpointing",
    "layerwise_lr_decay",
    "compile",
    "compile_scope",
)
"""Settings that can make a model that cannot be built."""

_STEP_SETTINGS = (
    *BUDGETS,
    *_MODEL_SETTINGS,
    "batch_size",
    "micro_batch_size",
    "gradient_checkpointing",
    "compile",
    "compile_scope",
    "compile_dynamic",
)
"""Settings that decide whether a trial has steps in which nothing is compiled."""


def _compile_in_place(config: TrialConfig, model: MultitaskModel) -> None:
    apply_compile(model, config.compile, config.compile_scope, config.compile_dynamic)


class CompatibilityCache(Protocol):
    """Where compatibility measurements are kept between trials and workers: `hpo.study.storage.Storage`."""

    def get_compat(self, key: str) -> Mapping[str, Any] | None: ...

    def put_compat(self, key: str, result: Mapping[str, Any]) -> Mapping[str, Any]: ...


class Executor:
    """Runs trials of one study on one device; keeps data and tokens from trial to trial.

    Raises DataError when the study's data cannot be used, InputError when its objective names a metric
    that no task has.
    """

    def __init__(
        self,
        study: StudyConfig,
        device: DeviceInfo,
        runs_dir: Path,
        compatibility_cache: CompatibilityCache | None = None,
        *,
        shared_device: bool = False,
    ) -> None:
        self.study = study
        self.device = device
        self.runs_dir = runs_dir
        self.amp, self.default_precision = apply_preset(study.amp, device)
        self.dataset: DataSet = load_data(study.data)
        self.tasks = self.dataset.tasks
        self._cache = compatibility_cache
        self.shared_device = shared_device
        self._tokenizers: dict[str, Any] = {}
        self._tokens: dict[tuple[str, str, int], TokenizedSplit] = {}
        self._num_started = 0
        self._has_compiled = False
        for objective in study.objective:
            check_metric(objective.metric, self.tasks)
        self._check_loss_settings()
        if device.type == "cpu":
            disable_malloc_trim()
        if device.type == "cuda" and self.amp.memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(self.amp.memory_fraction, device.index)
        # Compiled kernels are kept between trials and runs, unless the user has a place for them already.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((runs_dir / "cache" / "inductor").resolve()))

    def _check_loss_settings(self) -> None:
        """Refuse, before the first trial, a loss that fits no task and the weight of no task."""
        space = self.study.search_space
        searched = getattr(space.get("loss"), "choices", ())
        for loss in (self.study.training.loss, *searched):
            check_loss(self.tasks, loss)
        names = [task.name for task in self.tasks]
        weighted = {name.removeprefix("loss_weight.") for name in space if name.startswith("loss_weight.")}
        for name in sorted(weighted | set(self.study.training.loss_weight)):
            if name not in names:
                raise InputError(f"loss_weight.{name}: there is no such task.{did_you_mean(name, names)}")

    def trial_folder(self, study_token: str, number: int) -> Path:
        """Where a trial of this study keeps its checkpoints; the token tells it from others of its name."""
        return self.runs_dir / self.study.name / f"checkpoints-{study_token[:8]}" / f"trial-{number:05d}"

    def check_study(self) -> None:
        """Run one example through the model of the study's fixed settings.

        Raises InputError where the model or its settings cannot be used.
        """
        if is_searched(self.study.search_space, _MODEL_SETTINGS):
            return
        config = build_trial_config(self.study, {}, self.default_precision, self.amp)
        split, pad_id = self.tokens("train", config), self.pad_id(config)
        model = self.build_model(config)
        objective = self._objective(config, model, split)
        batch = collate(split, np.array([0]), self.tasks, pad_id)
        items, batch = objective.count(batch), batch.to(self.device.torch_device)
        objective.start_step()
        with torch.no_grad():
            objective(model.eval(), batch, items, items)

    def run(
        self,
        params: Mapping[str, Any],
        folder: Path | None,
        resume_key: str,
        on_evaluation: Callable[[ScoredEvaluation], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> TrialResult:
        """Run one trial with `params` to its outcome.

        `folder` holds its checkpoints, None: it has none; those of another `resume_key` are not touched but
        not used either.
        `on_evaluation` may end the trial by raising a TrialEnd. When `should_stop` says so, the trial is
        checkpointed and ends as `preempted`.

        Raises InputError and RunError for what concerns more than this trial.
        """
        log = TrialRecorder(self.device, self.shared_device, self.amp.memory_fraction)
        # Once more for the second trial: the first has imported what it needed. What the compiler keeps of
        # a trial it lets go of later.
        gc_collect(freeze=self._num_started < 2 and not self._has_compiled)
        self._num_started += 1
        values = None
        trace = None
        try:
            values = self._run(params, folder, resume_key, on_evaluation, should_stop, log)
            outcome, reason = Outcome.COMPLETE, ""
        except TrialEnd as end:
            outcome, reason = end.outcome, str(end)
        except ModelError as error:
            # Where the study searches what the model is made of, a combination that cannot be built is
            # this trial's end and not the study's.
            if not is_searched(self.study.search_space, _MODEL_SETTINGS):
                raise
            outcome, reason = Incompatible.outcome, str(error)
        except (InputError, RunError):
            raise
        except Exception as error:
            outcome = Outcome.OOM if is_out_of_memory(error) else Outcome.FAILED
            reason, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        return log.result(outcome, reason, values, trace)

    def _run(
        self,
        params: Mapping[str, Any],
        folder: Path | None,
        resume_key: str,
        on_evaluation: Callable[[ScoredEvaluation], None],
        should_stop: Callable[[], bool],
        log: TrialRecorder,
    ) -> tuple[float, ...]:
        config = build_trial_config(self.study, params, self.default_precision, self.amp)
        check_loss(self.tasks, config.loss)
        log.precision = {
            "requested": config.fp_precision,
            "effective": None,
            "support": support(config.fp_precision, self.device).level,
        }
        resolution = resolve(config.fp_precision, self.device, config.amp)
        log.resolved(resolution)
        log.reset_memory()
        checkpoints = NoCheckpoints() if folder is None else CheckpointStore(folder)
        with backend_flags(resolution.precision, config.amp), checkpoints as store:
            return self._train(config, resolution, store, resume_key, on_evaluation, should_stop, log)

    def _train(
        self,
        config: TrialConfig,
        resolution: Resolution,
        store: CheckpointStore | NoCheckpoints,
        resume_key: str,
        on_evaluation: Callable[[ScoredEvaluation], None],
        should_stop: Callable[[], bool],
        log: TrialRecorder,
    ) -> tuple[float, ...]:
        precision = resolution.precision
        pad_id = self.pad_id(config)
        train_split = self.tokens("train", config)
        validation_split = self.tokens("validation", config)
        torch.manual_seed(config.seed)
        model = self.build_model(config)
        objective = self._objective(config, model, train_split)
        compatibility = self._compatibility(config, resolution, model, objective, train_split, pad_id)
        log.compatibility = compatibility
        log.data = {
            "num_examples": len(train_split.examples),
            "num_cut_examples": train_split.num_cut_examples,
            "num_lost_spans": dict(train_split.num_lost_spans or {}),
        }
        if compatibility.verdict == "incompatible":
            raise Incompatible(" ".join(compatibility.reasons))
        # The check's passes are not this trial's memory.
        release_free_memory(self.device)
        log.reset_memory()

        used_ids = self.used_ids(config)
        optimizer = self.prepare(model, precision, config, used_ids)
        log.mixed_precision = mixed_precision = MixedPrecision(precision, config.amp, self.device)
        log.progress = progress = TrainState()
        log.meter = meter = ThroughputMeter(self.device)
        log.flops = partial(training_flops, model)
        used = hashlib.blake2b(used_ids.tobytes(), digest_size=8).hexdigest()
        resume_key = f"{resume_key}/{CHECKPOINT_FORMAT}/{resolution.effective}/{self.device.type}/{used}"
        self._resume(store, resume_key, model, optimizer, mixed_precision, progress, log)
        observation = self._observe(model, train_split, mixed_precision, pad_id)
        disagreement = observation.disagreement(precision)
        if config.compile != "none":
            seconds = self._compile(config, model, objective, train_split, mixed_precision, pad_id)
            log.compile_seconds = seconds
            log.compile_clock.start()
        log.observed(observation.telemetry(compiled=bool(compiled_modules(model))), disagreement)

        log.setup_seconds = time.perf_counter() - log.started
        last_saved = time.monotonic()

        def save(best: Mapping[str, Any] | None = None, *, at_end: bool = False) -> None:
            nonlocal last_saved
            state = {
                "resume_key": resume_key,
                "progress": progress.state_dict(),
                "optimizer": optimizer.state_dict(),
                "mixed_precision": mixed_precision.state_dict(),
                "best": None if log.best is None else log.best.state_dict(),
                "evaluation_rates": log.evaluation_rates,
                "meter": meter.state_dict(),
            }
            # From the end of the budget there is nothing to go on to.
            store.save(
                progress.step,
                model.state_dict(),
                state=None if at_end else state,
                best=best,
                copy=not at_end,
            )
            last_saved = time.monotonic()

        def on_step() -> bool:
            if should_stop():
                save()
                raise Preempted(f"told to stop after step {progress.step}; checkpointed.")
            if progress.step % UTILIZATION_EVERY == 0:
                utilization.sample()
            due = time.monotonic() - last_saved > self.study.checkpoint.every_seconds
            if due:
                save()
            return due

        plan = self._plan(config)
        log.utilization = utilization = Utilization(self.device, torch.get_num_threads())
        for evaluation in train(
            model,
            optimizer,
            objective,
            mixed_precision,
            train_split,
            validation_split,
            plan,
            progress,
            meter,
            pad_id,
            on_step,
            log.compile_clock,
        ):
            log.evaluation_rates.append(evaluation.examples_per_second)
            scored = ScoredEvaluation(evaluation, self._values(evaluation, config, log))
            is_best = self._is_better(scored, log.best)
            if is_best:
                log.best = scored
            on_evaluation(scored)
            if is_best:
                # After the report: a trial never goes on from behind one that was not made.
                best = {
                    "resume_key": resume_key,
                    "config": config.model_dump_json(),
                    "precision": precision.name,
                    "best": scored.state_dict(),
                }
                save(best, at_end=evaluation.budget_used >= 1)
        store.finish()
        assert log.best is not None
        return self._final_values(log.best.values, log)

    # Parts of a trial, each made from the settings that it takes.

    def tokenizer(self, config: TrialConfig) -> Any:
        """The tokenizer of this trial's encoder; kept from trial to trial."""
        key = json.dumps(config.encoder, sort_keys=True)
        if key not in self._tokenizers:
            self._tokenizers[key] = load_tokenizer(
                config.encoder,
                revision=self.study.model.revision,
                trust_remote_code=self.study.model.trust_remote_code,
            )
        return self._tokenizers[key]

    def pad_id(self, config: TrialConfig) -> int:
        """The token that pads batches; 0 where the tokenizer has none, behind the attention mask."""
        return self.tokenizer(config).pad_token_id or 0

    def tokens(self, split: str, config: TrialConfig) -> TokenizedSplit:
        """The tokenised split for this trial's encoder and length; shared by trials and workers."""
        key = (split, json.dumps(config.encoder, sort_keys=True), config.max_length)
        if key not in self._tokens:
            self._tokens[key] = load_tokenized(
                self.dataset,
                split,
                self.tokenizer(config),
                Windowing(
                    config.max_length,
                    self.study.data.long_text,
                    self.study.data.stride_of(config.max_length),
                    self.study.data.pair_segments,
                ),
                self.runs_dir / "cache" / "tokens",
            )
        few_shapes = self.device.type == "cuda" or config.compile != "none"
        return replace(self._tokens[key], length_multiple=LENGTH_MULTIPLE if few_shapes else 1)

    def build_model(self, config: TrialConfig) -> MultitaskModel:
        """The trial's model in fp32 weights, on the device."""
        model = build_model(
            config.encoder,
            self.tasks,
            pooling=config.pooling,
            head_type=config.head_type,
            head_hidden_size=config.head_hidden_size,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            head_dropout=config.head_dropout,
            freeze_layers=config.freeze_layers,
            gradient_checkpointing=config.gradient_checkpointing,
            attention=config.attention,
            loss_weighting=config.loss_weighting,
            max_length=config.max_length,
            revision=self.study.model.revision,
            trust_remote_code=self.study.model.trust_remote_code,
        )
        return model.to(self.device.torch_device)

    def _objective(self, config: TrialConfig, model: MultitaskModel, split: TokenizedSplit) -> MultitaskLoss:
        weights: dict[str, Tensor | None] = {}
        if config.class_weighting == "balanced":
            chunks = np.array_split(np.arange(split.num_windows), max(1, split.num_windows // 256))
            for task in self.tasks:
                targets = (collate(split, chunk, (task,), 0).targets[task.name] for chunk in chunks)
                weight = class_weights(task, targets)
                weights[task.name] = None if weight is None else weight.to(self.device.torch_device)
        return MultitaskLoss(
            self.tasks,
            LossOptions(config.loss, config.label_smoothing, config.focal_gamma),
            config.loss_weight,
            weights,
            model.log_variance if config.loss_weighting == "uncertainty" else None,
        )

    def used_ids(self, config: TrialConfig) -> NDArray[Any]:
        """The tokens of training and validation, and padding: sorted, each once."""
        splits = (self.tokens(name, config) for name in ("train", "validation"))
        return np.unique(np.concatenate([[self.pad_id(config)], *(split.used_ids for split in splits)]))

    def prepare(
        self, model: MultitaskModel, precision: Precision, config: TrialConfig, used_ids: NDArray[Any]
    ) -> torch.optim.Optimizer:
        """Give the model the weights that are trained, and return their optimiser."""
        prepare_model(model, precision)
        compact_vocabulary(model, config.optimizer, used_ids)
        keeps = config.compile == "none" and reads_short_gradients(config.optimizer)
        reduced = keep_reduced_weights(model, precision, self.device) if keeps else {}
        groups = parameter_groups(
            model,
            learning_rate=config.learning_rate,
            head_learning_rate=config.head_learning_rate,
            weight_decay=config.weight_decay,
            layerwise_lr_decay=config.layerwise_lr_decay,
        )
        return build_optimizer(config.optimizer, groups, betas=config.betas, reduced=reduced)

    def _plan(self, config: TrialConfig) -> TrainingArgs:
        evaluation = self.study.evaluation
        return TrainingArgs(
            budget=Budget(config.epochs, config.max_steps, config.max_seconds),
            batch_size=config.batch_size,
            micro_batch_size=config.micro_batch_size or config.batch_size,
            seed=config.seed,
            schedule=config.schedule,
            warmup_ratio=config.warmup_ratio,
            max_grad_norm=config.max_grad_norm or 0.0,
            num_evaluations=evaluation.count(config.epochs),
            evaluation_tokens=evaluation.batch_tokens,
            decision_metrics=decision_metrics([objective.metric for objective in self.study.objective]),
        )

    def _compatibility(
        self,
        config: TrialConfig,
        resolution: Resolution,
        model: MultitaskModel,
        objective: MultitaskLoss,
        split: TokenizedSplit,
        pad_id: int,
    ) -> Compatibility:
        bounds = self.study.compat
        if not bounds.enabled:
            return Compatibility("skipped", (), Measurement(resolution.effective))
        key = self._compatibility_key(config, resolution)
        cached = self._cache.get_compat(key) if self._cache else None
        if cached is not None:
            return judge(Measurement(**cached), bounds, cached=True)
        measurement = self._measure(config, resolution.precision, model, objective, split, pad_id)
        if self._cache:
            self._cache.put_compat(key, json_safe(asdict(measurement)))
        return judge(measurement, bounds)

    def _measure(
        self,
        config: TrialConfig,
        precision: Precision,
        model: MultitaskModel,
        objective: MultitaskLoss,
        split: TokenizedSplit,
        pad_id: int,
        repeats: int = 1,
    ) -> Measurement:
        """Check on the longest window of the data beside the shortest, so that there is padding.

        Raises OutOfMemory when not even the longest alone fits.
        """
        order = np.argsort(split.lengths_W)
        for windows in (order[[-1, 0]], order[[-1]]):
            try:
                return measure(
                    model,
                    collate(split, windows, self.tasks, pad_id),
                    objective,
                    precision,
                    config.amp,
                    self.device,
                    partial(_compile_in_place, config) if config.compile != "none" else None,
                    repeats,
                )
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
        raise OutOfMemory(f"one example of {split.lengths_W.max()} tokens does not fit into memory.")

    def check_precision(self, name: str, repeats: int) -> Compatibility:
        """The compatibility check alone, with the study's fixed settings, emulated or not; not cached."""
        config = build_trial_config(self.study, {}, name, self.amp)
        pad_id = self.pad_id(config)
        split = self.tokens("train", config)
        torch.manual_seed(config.seed)
        model = self.build_model(config)
        objective = self._objective(config, model, split)
        measurement = self._measure(config, PRECISIONS[name], model, objective, split, pad_id, repeats)
        return judge(measurement, self.study.compat)

    def _compatibility_key(self, config: TrialConfig, resolution: Resolution) -> str:
        """A hash of all that the check's measurements depend on."""
        settings = {
            "encoder": config.encoder,
            "revision": self.study.model.revision,
            "tasks": [repr(task) for task in self.tasks],
            "weights": _fingerprint(config.encoder),
            "frozen": config.freeze_layers,
            "cuts": [self.study.data.long_text, self.study.data.stride, self.study.data.pair_segments],
            "heads": [config.pooling, config.head_type, config.head_hidden_size, config.loss_weighting],
            "loss": [config.loss, config.label_smoothing, config.focal_gamma, config.class_weighting],
            "loss_weight": config.loss_weight,
            "max_length": config.max_length,
            "attention": config.attention,
            "gradient_checkpointing": config.gradient_checkpointing,
            "precision": resolution.effective,
            "amp": [config.amp.init_scale, config.amp.backoff_factor, config.amp.min_scale, config.amp.tf32],
            "compile": [config.compile, config.compile_scope, config.compile_dynamic],
            "device": [self.device.name, self.device.compute_capability, sorted(self.device.cpu_features)],
            "versions": [torch.__version__, transformers.__version__, self.device.cuda_version],
            "data": self.dataset.fingerprint,
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()

    def _observe(
        self, model: nn.Module, split: TokenizedSplit, mixed_precision: MixedPrecision, pad_id: int
    ) -> Any:
        """One real example through the prepared model as training runs it: the dtypes that come out."""
        batch = collate(split, np.array([0]), (), pad_id).to(self.device.torch_device)
        with observe(model) as seen, mixed_precision.evaluation():
            model(batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL)
        return seen

    def _compile(
        self,
        config: TrialConfig,
        model: MultitaskModel,
        objective: MultitaskLoss,
        split: TokenizedSplit,
        mixed_precision: MixedPrecision,
        pad_id: int,
    ) -> float:
        """Compile the model in place and run its shapes once; the seconds, which are no training.

        A shape that comes up later all the same compiles in its step.
        """
        started = time.perf_counter()
        self._has_compiled = True
        torch._dynamo.reset()  # graphs of earlier trials would count towards its limit of recompilations
        _compile_in_place(config, model)
        order = np.argsort(split.lengths_W)
        # Two lengths, so that what is dynamic is found out; with and without gradients.
        for windows in (order[-config.batch_size :], order[: config.batch_size]):
            batch = collate(split, windows, self.tasks, pad_id)
            items, batch = objective.count(batch), batch.to(self.device.torch_device)
            objective.start_step()
            with mixed_precision.autocast():
                loss = objective(model.train(), batch, items, items)
            mixed_precision.scaler.scale(loss).backward()
            model.zero_grad(set_to_none=True)
            with mixed_precision.evaluation():
                model.eval()(batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL)
        synchronize(self.device)
        return time.perf_counter() - started

    def _resume(
        self,
        store: CheckpointStore | NoCheckpoints,
        resume_key: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mixed_precision: MixedPrecision,
        progress: TrainState,
        log: TrialRecorder,
    ) -> None:
        """Go on from the trial's last checkpoint if there is one.

        The best weights may be newer, of an evaluation that will be made again: its value, which was
        reported before they were written, stays the trial's best until there is a better one.
        """
        best = store.best()
        if best is not None and best.state.get("resume_key") == resume_key:
            log.best = ScoredEvaluation.from_state_dict(best.state["best"])
        checkpoint = store.latest()
        if checkpoint is None or checkpoint.state["resume_key"] != resume_key:
            return
        model.load_state_dict(checkpoint.weights)
        optimizer.load_state_dict(checkpoint.state["optimizer"])
        mixed_precision.load_state_dict(checkpoint.state.get("mixed_precision", {}))
        for key, value in checkpoint.state["progress"].items():
            setattr(progress, key, value)
        log.evaluation_rates = list(checkpoint.state["evaluation_rates"])
        if log.meter is not None:
            log.meter.load_state_dict(checkpoint.state["meter"])
        if log.best is None and checkpoint.state["best"] is not None:
            log.best = ScoredEvaluation.from_state_dict(checkpoint.state["best"])
        log.resumed_from_step = progress.step

    def _values(self, evaluation: Evaluation, config: TrialConfig, log: TrialRecorder) -> tuple[float, ...]:
        measured = {
            "train_examples_per_second": evaluation.rates.get("train_examples_per_second"),
            "train_tokens_per_second": evaluation.rates.get("train_tokens_per_second"),
            "peak_memory_bytes": log.memory.read() if log.memory else None,
            "evaluation_examples_per_second": evaluation.examples_per_second,
        }
        metrics = [objective.metric for objective in self.study.objective]
        unmeasured = [metric for metric in metrics if metric in measured and measured[metric] is None]
        if unmeasured and evaluation.budget_used >= 1:
            # As with a model that cannot be built: it may be this trial's settings alone.
            searched = is_searched(self.study.search_space, _STEP_SETTINGS)
            budget = next(name for name in BUDGETS if getattr(config, name) is not None)
            raise (Incompatible if searched else InputError)(
                f"the objective {unmeasured[0]} has no value: something was compiled in every step of the "
                f"trial ({evaluation.step} in all), so that none tells the speed. Raise `{budget}`, or use "
                "`compile: none`."
            )
        return tuple(
            objective_value(objective.metric, evaluation.metrics, self.tasks, measured)
            for objective in self.study.objective
        )

    def _final_values(self, best: tuple[float, ...], log: TrialRecorder) -> tuple[float, ...]:
        """Metrics of the best evaluation; what was measured, of the whole trial."""
        telemetry = log.result(Outcome.COMPLETE, "", None, None).telemetry
        measured = telemetry["throughput"] | {"peak_memory_bytes": telemetry["peak_memory_bytes"]}
        return tuple(
            measured[objective.metric] if objective.metric in MEASURED_METRICS else value
            for objective, value in zip(self.study.objective, best, strict=True)
        )

    def _is_better(self, new: ScoredEvaluation, old: ScoredEvaluation | None) -> bool:
        """By the first objective; of equals the later one, which has seen more data.

        A measured objective (memory, throughput) says nothing of a model: the last evaluation is the best.
        """
        if old is None or self.study.objective[0].metric in MEASURED_METRICS:
            return True
        sign = 1 if self.study.objective[0].direction == "maximize" else -1
        return sign * new.values[0] >= sign * old.values[0]


def _fingerprint(encoder: str | Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    """Names, sizes and times of a local encoder's files: its weights may change under the same name."""
    if not isinstance(encoder, str) or not Path(encoder).is_dir():
        return None
    files = (path for path in Path(encoder).iterdir() if path.is_file())
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
