"""One trial, from its configuration to its outcome: the only place that unpacks a TrialConfig.

    resolve precision -> tokens -> model -> compatibility check -> train / evaluate -> TrialResult

What cannot work is found out in this order because it is the order of cost: an unsupported precision
takes milliseconds, a cached compatibility verdict one query. Every way a trial can end becomes a
`TrialResult`; only what concerns the whole study (bad data, a full disk, a lost lease) is raised.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from hpo.amp import MixedPrecision, backend_flags, observe, prepare_model
from hpo.checkpoint import CheckpointStore
from hpo.compat import Compatibility, Measurement, judge, measure
from hpo.data import DataSet, load_data
from hpo.decoding import Decision
from hpo.device import DeviceInfo, PeakMemory, Utilization, is_out_of_memory, synchronize
from hpo.errors import (
    DataError,
    Incompatible,
    InputError,
    ModelError,
    OutOfMemory,
    Preempted,
    RunError,
    TrialEnd,
    did_you_mean,
)
from hpo.model import (
    MultitaskModel,
    apply_compile,
    build_model,
    compiled_modules,
    export_model,
    load_tokenizer,
    training_flops,
)
from hpo.optim import build_optimizer, parameter_groups
from hpo.precision import PRECISIONS, Precision, Resolution, apply_preset, resolve, support
from hpo.search_space import is_searched
from hpo.study_config import StudyConfig
from hpo.tasks import LossOptions, Task, check_loss, class_weights
from hpo.telemetry import ThroughputMeter, TrialResult, json_safe, peak_flops
from hpo.token_cache import load_tokenized
from hpo.tokens import TokenizedSplit, collate
from hpo.train import Budget, Evaluation, Objective, Plan, Progress, evaluate, train
from hpo.trial_config import TrialConfig, build_trial_config


def _compile_in_place(config: TrialConfig, model: MultitaskModel) -> None:
    apply_compile(model, config.compile, config.compile_scope, config.compile_dynamic)


class CompatibilityCache(Protocol):
    """Where compatibility measurements are kept between trials and workers: `hpo.storage.Storage`."""

    def get_compat(self, key: str) -> Mapping[str, Any] | None: ...

    def put_compat(self, key: str, result: Mapping[str, Any]) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class ScoredEvaluation:
    """An evaluation with the study's objective values for it."""

    evaluation: Evaluation
    values: tuple[float, ...]


@dataclass
class _Run:
    """What a trial has come to so far; whole or not, it becomes the trial's telemetry."""

    started: float = field(default_factory=time.perf_counter)
    setup_seconds: float | None = None
    """From the start to the first training step, in this process."""
    telemetry: dict[str, Any] = field(default_factory=dict)
    effective: str | None = None
    progress: Progress | None = None
    meter: ThroughputMeter | None = None
    mixed_precision: MixedPrecision | None = None
    utilization: Utilization | None = None
    memory: PeakMemory | None = None
    best: ScoredEvaluation | None = None
    flops: Callable[[int, int], float | None] | None = None
    """Of training over so many tokens in so many windows."""
    evaluation_rates: list[float] = field(default_factory=list)


class Executor:
    """Runs trials of one study on one device; keeps data and tokens from trial to trial.

    Raises DataError when the study's data cannot be used, StudyFileError-like InputError when its
    objective names a metric that no task has.
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
        self._shared_device = shared_device
        self._tokens: dict[tuple[str, str, int], TokenizedSplit] = {}
        for objective in study.objective:
            check_metric(objective.metric, self.tasks)
        if device.type == "cuda" and self.amp.memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(self.amp.memory_fraction, device.index)
        # Compiled kernels are kept between trials and runs, unless the user has a place for them already.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((runs_dir / "cache" / "inductor").resolve()))

    def trial_folder(self, study_token: str, number: int) -> Path:
        """Where a trial of this study keeps its checkpoints; the token tells it from others of its name."""
        return self.runs_dir / self.study.name / f"checkpoints-{study_token[:8]}" / f"trial-{number:05d}"

    def run(
        self,
        params: Mapping[str, Any],
        folder: Path,
        identity: str,
        on_evaluation: Callable[[ScoredEvaluation], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> TrialResult:
        """Run one trial with `params` to its outcome.

        `folder` holds its checkpoints; those of another `identity` are not touched but not used either.
        `on_evaluation` may end the trial by raising a TrialEnd. When `should_stop` says so, the trial is
        checkpointed and ends as `preempted`.

        Raises InputError and RunError for what concerns more than this trial.
        """
        run = _Run(telemetry={"device": self._device_record()})
        values = None
        trace = None
        try:
            values = self._run(params, folder, identity, on_evaluation, should_stop, run)
            outcome, reason = "complete", ""
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
            outcome = "oom" if is_out_of_memory(error) else "failed"
            reason, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        telemetry = json_safe(self._telemetry(run, time.perf_counter() - run.started))
        return TrialResult(outcome, reason, values, self._headline(run, telemetry), telemetry, trace)

    def _run(
        self,
        params: Mapping[str, Any],
        folder: Path,
        identity: str,
        on_evaluation: Callable[[ScoredEvaluation], None],
        should_stop: Callable[[], bool],
        run: _Run,
    ) -> tuple[float, ...]:
        config = build_trial_config(self.study, params, self.default_precision, self.amp)
        check_loss(self.tasks, config.loss)
        run.telemetry["precision"] = {
            "requested": config.fp_precision,
            "effective": None,
            "support": support(config.fp_precision, self.device).level,
        }
        resolution = resolve(config.fp_precision, self.device, config.amp)
        run.effective = resolution.effective
        run.telemetry["precision"] = _precision_record(resolution)
        run.memory = PeakMemory(self.device)
        run.memory.reset()
        with backend_flags(resolution.precision, config.amp):
            return self._train(config, resolution, folder, identity, on_evaluation, should_stop, run)

    def _train(
        self,
        config: TrialConfig,
        resolution: Resolution,
        folder: Path,
        identity: str,
        on_evaluation: Callable[[ScoredEvaluation], None],
        should_stop: Callable[[], bool],
        run: _Run,
    ) -> tuple[float, ...]:
        precision = resolution.precision
        pad_id = self._tokenizer(config).pad_token_id or 0
        train_split = self.tokens("train", config)
        validation_split = self.tokens("validation", config)
        torch.manual_seed(config.seed)
        model = self._model(config)
        objective = self._objective(config, model, train_split)
        compatibility = self._compatibility(config, resolution, model, objective, train_split, pad_id)
        run.telemetry["compatibility"] = compatibility.telemetry()
        if compatibility.verdict == "incompatible":
            raise Incompatible(" ".join(compatibility.reasons))

        prepare_model(model, precision)
        optimizer = build_optimizer(
            config.optimizer,
            parameter_groups(
                model,
                learning_rate=config.learning_rate,
                head_learning_rate=config.head_learning_rate,
                weight_decay=config.weight_decay,
                layerwise_lr_decay=config.layerwise_lr_decay,
            ),
            betas=config.betas,
        )
        run.mixed_precision = mixed_precision = MixedPrecision(precision, config.amp, self.device)
        run.progress = progress = Progress()
        run.meter = meter = ThroughputMeter(self.device)
        run.flops = partial(training_flops, model)
        store = CheckpointStore(folder)
        self._resume(store, identity, model, optimizer, mixed_precision, progress, run)
        observation = self._observe(model, train_split, mixed_precision, pad_id)
        disagreement = observation.disagreement(precision)
        if config.compile != "none":
            seconds = self._compile(config, model, objective, train_split, mixed_precision, pad_id)
            run.telemetry["compile_seconds"] = seconds
        run.telemetry["precision"] |= {
            "observed": observation.telemetry(compiled=bool(compiled_modules(model))),
            "agrees": not disagreement,
            "reason": " ".join(filter(None, (resolution.reason, disagreement))),
        }

        run.setup_seconds = time.perf_counter() - run.started
        last_saved = time.monotonic()

        def save() -> None:
            nonlocal last_saved
            state = {
                "identity": identity,
                "progress": progress.state_dict(),
                "optimizer": optimizer.state_dict(),
                "mixed_precision": mixed_precision.state_dict(),
                "best": None if run.best is None else _evaluation_state(run.best),
                "evaluation_rates": run.evaluation_rates,
            }
            store.save(progress.step, model.state_dict(), state)
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
        run.utilization = utilization = Utilization(self.device, torch.get_num_threads())
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
        ):
            run.evaluation_rates.append(evaluation.examples_per_second)
            scored = ScoredEvaluation(evaluation, self._values(evaluation, run))
            if self._is_better(scored, run.best):
                run.best = scored
                store.save_best(evaluation.step, model.state_dict(), self._export_state(config, scored))
            on_evaluation(scored)
        store.finish()
        assert run.best is not None
        return run.best.values

    # Parts of a trial, each made from the settings that it takes.

    def _tokenizer(self, config: TrialConfig) -> Any:
        return load_tokenizer(
            config.encoder,
            revision=self.study.model.revision,
            trust_remote_code=self.study.model.trust_remote_code,
        )

    def tokens(self, split: str, config: TrialConfig) -> TokenizedSplit:
        """The tokenised split for this trial's encoder and length; shared by trials and workers."""
        key = (split, json.dumps(config.encoder, sort_keys=True), config.max_length)
        if key not in self._tokens:
            self._tokens[key] = load_tokenized(
                self.dataset,
                split,
                self._tokenizer(config),
                config.max_length,
                self.study.data.long_text,
                self.study.data.stride,
                self.study.data.pair_segments,
                self.runs_dir / "cache" / "tokens",
            )
        return self._tokens[key]

    def _model(self, config: TrialConfig) -> MultitaskModel:
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

    def _objective(self, config: TrialConfig, model: MultitaskModel, split: TokenizedSplit) -> Objective:
        weights: dict[str, Tensor | None] = {}
        if config.class_weighting == "balanced":
            chunks = np.array_split(np.arange(split.num_windows), max(1, split.num_windows // 256))
            for task in self.tasks:
                targets = (collate(split, chunk, (task,), 0).targets[task.name] for chunk in chunks)
                weight = class_weights(task, targets)
                weights[task.name] = None if weight is None else weight.to(self.device.torch_device)
        return Objective(
            self.tasks,
            LossOptions(config.loss, config.label_smoothing, config.focal_gamma),
            config.loss_weight,
            weights,
            model.log_variance if config.loss_weighting == "uncertainty" else None,
        )

    def _plan(self, config: TrialConfig) -> Plan:
        evaluation = self.study.evaluation
        epochs = 1 if config.epochs is None else math.ceil(config.epochs)
        return Plan(
            budget=Budget(config.epochs, config.max_steps, config.max_seconds),
            batch_size=config.batch_size,
            micro_batch_size=config.micro_batch_size or config.batch_size,
            seed=config.seed,
            schedule=config.schedule,
            warmup_ratio=config.warmup_ratio,
            max_grad_norm=config.max_grad_norm or 0.0,
            num_evaluations=evaluation.per_trial or epochs * evaluation.per_epoch,
            evaluation_tokens=evaluation.batch_tokens,
        )

    def _compatibility(
        self,
        config: TrialConfig,
        resolution: Resolution,
        model: MultitaskModel,
        objective: Objective,
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
        objective: Objective,
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
        pad_id = self._tokenizer(config).pad_token_id or 0
        split = self.tokens("train", config)
        torch.manual_seed(config.seed)
        model = self._model(config)
        objective = self._objective(config, model, split)
        measurement = self._measure(config, PRECISIONS[name], model, objective, split, pad_id, repeats)
        return judge(measurement, self.study.compat)

    def _compatibility_key(self, config: TrialConfig, resolution: Resolution) -> str:
        """A hash of all that the check's measurements depend on."""
        settings = {
            "encoder": config.encoder,
            "revision": self.study.model.revision,
            "tasks": [repr(task) for task in self.tasks],
            "heads": [config.pooling, config.head_type, config.head_hidden_size, config.loss_weighting],
            "loss": [config.loss, config.label_smoothing, config.focal_gamma, config.class_weighting],
            "max_length": config.max_length,
            "attention": config.attention,
            "gradient_checkpointing": config.gradient_checkpointing,
            "precision": resolution.effective,
            "init_scale": config.amp.init_scale if resolution.precision.loss_scaling else None,
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
        with observe(model) as seen, torch.no_grad(), mixed_precision.autocast():
            model(batch.input_ids_BL, batch.attention_mask_BL, batch.type_ids_BL)
        return seen

    def _compile(
        self,
        config: TrialConfig,
        model: MultitaskModel,
        objective: Objective,
        split: TokenizedSplit,
        mixed_precision: MixedPrecision,
        pad_id: int,
    ) -> float:
        """Compile the model in place; seconds of its first pass, apart from training."""
        _compile_in_place(config, model)
        batch = collate(split, np.arange(min(2, split.num_windows)), self.tasks, pad_id)
        items = objective.count(batch)
        started = time.perf_counter()
        with mixed_precision.autocast():
            loss = objective(model, batch.to(self.device.torch_device), items, items)
        mixed_precision.scaler.scale(loss).backward()
        model.zero_grad(set_to_none=True)
        synchronize(self.device)
        return time.perf_counter() - started

    def _resume(
        self,
        store: CheckpointStore,
        identity: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mixed_precision: MixedPrecision,
        progress: Progress,
        run: _Run,
    ) -> None:
        """Go on from the trial's last checkpoint if there is one."""
        checkpoint = store.latest()
        if checkpoint is None or checkpoint.state["identity"] != identity:
            return
        model.load_state_dict(checkpoint.weights)
        optimizer.load_state_dict(checkpoint.state["optimizer"])
        mixed_precision.load_state_dict(checkpoint.state.get("mixed_precision", {}))
        for key, value in checkpoint.state["progress"].items():
            setattr(progress, key, value)
        run.evaluation_rates = list(checkpoint.state["evaluation_rates"])
        if checkpoint.state["best"] is not None:
            run.best = _evaluation_from(checkpoint.state["best"])
        run.telemetry["resumed_from_step"] = progress.step

    def _values(self, evaluation: Evaluation, run: _Run) -> tuple[float, ...]:
        extra = {
            "train_examples_per_second": evaluation.rates.get("train_examples_per_second"),
            "train_tokens_per_second": evaluation.rates.get("train_tokens_per_second"),
            "peak_memory_bytes": run.memory.read() if run.memory else None,
            "evaluation_examples_per_second": evaluation.examples_per_second,
        }
        return tuple(
            objective_value(objective.metric, evaluation.metrics, self.tasks, extra)
            for objective in self.study.objective
        )

    def _is_better(self, new: ScoredEvaluation, old: ScoredEvaluation | None) -> bool:
        """By the first objective; of equals the later one, which has seen more data."""
        if old is None:
            return True
        sign = 1 if self.study.objective[0].direction == "maximize" else -1
        return sign * new.values[0] >= sign * old.values[0]

    def _export_state(self, config: TrialConfig, scored: ScoredEvaluation) -> dict[str, Any]:
        return {"config": config.model_dump_json(), "best": _evaluation_state(scored)}

    # The record

    def _device_record(self) -> dict[str, Any]:
        capability = self.device.compute_capability
        return {
            "type": self.device.type,
            "name": self.device.name,
            "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": self.device.cuda_version,
            "num_threads": torch.get_num_threads(),
            "host": self.device.host,
            "shared": self._shared_device,
        }

    def _telemetry(self, run: _Run, total_seconds: float) -> dict[str, Any]:
        telemetry = dict(run.telemetry) | {"total_seconds": total_seconds}
        if run.memory is not None:
            telemetry["peak_memory_bytes"] = run.memory.read()
        if run.best is not None:
            telemetry["metrics"] = run.best.evaluation.metrics
            telemetry["decisions"] = {
                name: asdict(decision) for name, decision in run.best.evaluation.decisions.items()
            }
            telemetry["best_step"] = run.best.evaluation.step
        if run.progress is None or run.meter is None or run.mixed_precision is None:
            return telemetry
        statistics = run.mixed_precision.statistics()
        rates = run.evaluation_rates
        progress = run.progress
        telemetry |= {
            "throughput": run.meter.summary()
            | {"evaluation_examples_per_second": float(np.median(rates)) if rates else None},
            "scaler": {
                "scale_min": statistics.scale_min,
                "scale_mean": statistics.scale_mean,
                "scale_max": statistics.scale_max,
                "skipped_steps": statistics.skipped_steps,
            },
            "fp32_fallbacks": statistics.fp32_fallbacks,
            "micro_batch_size": progress.micro_batch_size,
            "oom_halvings": progress.oom_halvings,
            "num_steps": progress.step,
            "num_examples": progress.num_examples,
            "num_tokens": progress.num_tokens,
            "train_seconds": progress.train_seconds,
            "evaluation_seconds": progress.evaluation_seconds,
            "setup_seconds": run.setup_seconds,
            "device_utilization": run.utilization.read() if run.utilization else None,
            "model_flops_utilization": self._flops_utilization(run),
        }
        return telemetry

    def _flops_utilization(self, run: _Run) -> float | None:
        """Model FLOP/s over the data sheet's peak for the precision's products; None where unknown."""
        assert run.meter is not None
        assert run.mixed_precision is not None
        precision = run.mixed_precision.precision
        kind = "float8" if precision.float8 else "tf32" if precision.tf32 else precision.linear_dtype
        peak = peak_flops(self.device, kind)
        seconds = run.meter.measured_seconds
        if peak is None or run.flops is None or not seconds:
            return None
        flops = run.flops(run.meter.measured_tokens, run.meter.measured_examples)
        return None if flops is None else flops / seconds / peak

    def _headline(self, run: _Run, telemetry: Mapping[str, Any]) -> dict[str, str | float | int | bool]:
        throughput = telemetry.get("throughput", {})
        headline = {
            "fp_precision_effective": run.effective,
            "train_examples_per_second": throughput.get("train_examples_per_second"),
            "train_tokens_per_second": throughput.get("train_tokens_per_second"),
            "peak_memory_bytes": telemetry.get("peak_memory_bytes"),
        }
        return {key: value for key, value in headline.items() if value is not None}

    def evaluate_checkpoint(self, folder: Path, split: str) -> dict[str, dict[str, float]]:
        """Score a trial's best checkpoint on a split, with the decisions chosen on validation.

        Raises RunError when the checkpoint is gone or damaged, DataError when there is no such split.
        """
        if split not in self.dataset.splits:
            raise DataError(f"there is no split {split!r}.{did_you_mean(split, list(self.dataset.splits))}")
        model, config, precision, decisions = self._best_model(folder)
        with backend_flags(precision, config.amp):
            metrics, _ = evaluate(
                model,
                self.tokens(split, config),
                self.tasks,
                MixedPrecision(precision, config.amp, self.device),
                self.study.evaluation.batch_tokens,
                self._tokenizer(config).pad_token_id or 0,
                decisions,
            )
        return metrics

    def export_checkpoint(self, folder: Path, out_dir: Path) -> Path:
        """Write a trial's best checkpoint as a folder that transformers and `hpo.model` load.

        Raises RunError when the checkpoint is gone or damaged, ModelError when `out_dir` is not free.
        """
        model, config, precision, decisions = self._best_model(folder)
        return export_model(
            model,
            self._tokenizer(config),
            out_dir,
            max_length=config.max_length,
            precision=precision.name,
            decisions=decisions,
        )

    def _best_model(self, folder: Path) -> tuple[MultitaskModel, TrialConfig, Precision, dict[str, Decision]]:
        best = CheckpointStore(folder).best()
        if best is None:
            raise RunError(
                f"there is no intact checkpoint of the best evaluation in {folder}. It is written where the "
                "trial ran, and checkpoint.top_k says how many trials keep theirs."
            )
        config = TrialConfig.model_validate_json(best.state["config"])
        precision = resolve(config.fp_precision, self.device, config.amp).precision
        model = self._model(config)
        prepare_model(model, precision)
        model.load_state_dict(best.weights)
        return model, config, precision, _evaluation_from(best.state["best"]).evaluation.decisions


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
    "compile",
    "compile_scope",
)
"""Settings that can make a model that cannot be built."""

_EXTRA_METRICS = (
    "train_examples_per_second",
    "train_tokens_per_second",
    "evaluation_examples_per_second",
    "peak_memory_bytes",
)


def metric_names(tasks: tuple[Task, ...]) -> list[str]:
    """All that an objective can name."""
    return ["score", *(f"{task.name}/{metric}" for task in tasks for metric in task.metrics), *_EXTRA_METRICS]


def check_metric(metric: str, tasks: tuple[Task, ...]) -> None:
    """Raise InputError unless an objective can name this metric."""
    known = metric_names(tasks)
    if metric not in known:
        raise InputError(
            f"objective.metric: no task of this study has {metric!r}.{did_you_mean(metric, known)}"
        )


def objective_value(
    metric: str,
    metrics: Mapping[str, Mapping[str, float]],
    tasks: tuple[Task, ...],
    extra: Mapping[str, float | None],
) -> float:
    """The value of one objective: `score` is the mean of the tasks' primary metrics.

    Raises InputError when the evaluation did not give it, because no row of the split was labelled.
    """
    if metric == "score":
        primary = [
            metrics[task.name][task.primary_metric]
            for task in tasks
            if task.primary_metric in metrics[task.name]
        ]
        value = sum(primary) / len(primary) if primary else None
    elif "/" in metric:
        task_name, _, name = metric.partition("/")
        value = metrics[task_name].get(name)
    else:
        value = extra[metric]
    if value is None or not math.isfinite(value):
        raise InputError(f"the objective {metric} has no value: the validation split has no labels for it.")
    return value


def _precision_record(resolution: Resolution) -> dict[str, Any]:
    return {
        "requested": resolution.requested,
        "effective": resolution.effective,
        "support": resolution.support,
        "fell_back": resolution.fell_back,
        "reason": resolution.reason,
    }


def _evaluation_state(scored: ScoredEvaluation) -> dict[str, Any]:
    """Plain containers, for a checkpoint."""
    return {"values": list(scored.values), "evaluation": asdict(scored.evaluation)}


def _evaluation_from(state: Mapping[str, Any]) -> ScoredEvaluation:
    fields = dict(state["evaluation"])
    fields["decisions"] = {name: Decision(**decision) for name, decision in fields["decisions"].items()}
    return ScoredEvaluation(Evaluation(**fields), tuple(state["values"]))
