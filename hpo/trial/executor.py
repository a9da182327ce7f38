"""Runs the trials of one study on one device: the only place that unpacks a TrialConfig.

    resolve precision -> tokens -> model -> compatibility check -> train / evaluate -> TrialResult

The order is that of cost: an unsupported precision takes milliseconds, a cached compatibility verdict one
query. Every way a trial can end becomes a `TrialResult`; only what concerns the whole study (bad data, a full
disk, a lost lease) is raised. `hpo.trial.trial_run` has the steps; this file makes the parts of a trial and
keeps data and tokens from trial to trial.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpo.config.search_space import is_searched, suggest
from hpo.config.study_config import StudyConfig, of_deployed
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.config.trial_settings import LOSS_WEIGHT, MODEL_SETTINGS, OVERRIDE
from hpo.data.batches import collate
from hpo.data.dataset import load_data
from hpo.data.token_cache import load_tokenized
from hpo.data.tokenized_split import LENGTH_MULTIPLE, TokenizedSplit, Windowing
from hpo.device import DeviceInfo, limit_threads, probe_device
from hpo.errors import (
    Incompatible,
    InputError,
    ModelError,
    Nonfinite,
    RunError,
    TrialEnd,
    did_you_mean,
)
from hpo.inference.onnx_network import missing_packages
from hpo.memory import disable_malloc_trim, is_out_of_memory
from hpo.models.compact_embedding import compact_vocabulary
from hpo.models.encoder import load_encoder, load_tokenizer
from hpo.models.model_parts import part_modules, set_float32_parts
from hpo.models.multitask import HeadSettings, MultitaskModel, build_model
from hpo.outcome import Outcome
from hpo.precision.amp import backend_flags, prepare_model
from hpo.precision.environment import refuse_overrides, uses_of_float32
from hpo.precision.part_names import task_of
from hpo.precision.table import PRECISION, Precision, Resolution, apply_preset, resolve
from hpo.random_numbers import manual_seed
from hpo.training.checkpoint import CheckpointMirror
from hpo.training.compilation import apply_compile
from hpo.training.distributed import ONE_RANK, ConnectedRanks, Ranks
from hpo.training.loop import Budget, TrainingArgs
from hpo.training.losses import LossOptions, MultitaskLoss, check_loss, class_weights
from hpo.training.optim import build_optimizer, parameter_groups
from hpo.trial.compat import CompatibilityCache
from hpo.trial.objectives import check_metric, decision_metrics
from hpo.trial.telemetry import ScoredEvaluation, TrialRecorder, TrialResult, device_facts
from hpo.trial.trial_parts import TrialParts
from hpo.trial.trial_run import TrialRun


class Executor:
    """Runs trials of one study on one device; keeps data and tokens from trial to trial.

    `apply_compile` is what compiles a model in place, as `hpo.training.compilation.apply_compile` does.
    `ranks` are the processes that train each trial together, of which those after the first run `follow`.

    Raises DataError when the study's data cannot be used, InputError when its objective names a metric
    that no task has, or the environment makes one of its precisions untrue.
    """

    def __init__(
        self,
        study: StudyConfig,
        device: DeviceInfo,
        runs_dir: Path,
        compatibility_cache: CompatibilityCache | None = None,
        *,
        apply_compile: Callable[..., object] = apply_compile,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.study = study
        self.ranks = ranks
        self.device = device
        self.runs_dir = runs_dir
        self.amp, self.default_precision = apply_preset(study.amp, device)
        needs_float32 = uses_of_float32(
            check=study.compat.enabled,
            parts=bool(self._keys(OVERRIDE)),
            fallback=bool(self.amp.fallback_to_fp32),
        )
        precisions = study.precisions or [self.default_precision]
        refuse_overrides(precisions, self.amp, device.type, float32_for=needs_float32)
        self.dataset = load_data(study.data)
        self.tasks = self.dataset.tasks
        self.cache = compatibility_cache
        self.checkpoint_seconds = 0.0
        """How long the last checkpoint took to write."""
        self._apply_compile = apply_compile
        self._tokenizers: dict[str, Any] = {}
        self._tokens: dict[tuple[str, str, int], TokenizedSplit] = {}
        self._num_started = 0
        self._has_compiled = False
        for objective in study.objective:
            check_metric(objective.metric, self.tasks)
        if of_deployed(study.objective) and (missing := missing_packages()):
            raise InputError(f"objective.metric: what is deployed in int8 {missing}")
        if study.evaluation.test and "test" not in self.dataset.splits:
            found = ", ".join(self.dataset.splits)
            raise InputError(f"evaluation.test: the data must have a test split, but they have {found}.")
        self._check_loss_settings()
        if device.type == "cpu":
            disable_malloc_trim()
            limit_threads(device)
        if device.type == "cuda":  # 1.0: this process may have run a study with less
            torch.cuda.set_per_process_memory_fraction(self.amp.memory_fraction or 1.0, device.index)
        # Compiled kernels are kept between trials and runs, unless the user has a place for them already.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((runs_dir / "cache" / "inductor").resolve()))

    def _check_loss_settings(self) -> None:
        """Refuse, before the first trial, a loss that fits no task, and the weight or head of no task."""
        space = self.study.search_space
        searched = getattr(space.get("loss"), "choices", ())
        for loss in (self.study.training.loss, *searched):
            check_loss(self.tasks, loss)
        names = [task.name for task in self.tasks]
        tasks = {f"{LOSS_WEIGHT}{name}": name for name in self._keys(LOSS_WEIGHT)}
        tasks |= {f"{OVERRIDE}{part}": task for part in self._keys(OVERRIDE) if (task := task_of(part))}
        for setting, name in tasks.items():
            if name not in names:
                raise InputError(f"{setting}: there is no such task.{did_you_mean(name, names)}")

    def _keys(self, prefix: str) -> list[str]:
        """The keys that the study fixes or searches of a setting that has keys."""
        searched = {name.removeprefix(prefix) for name in self.study.search_space if name.startswith(prefix)}
        return sorted(searched | getattr(self.study.training, prefix[:-1]).keys())

    def trial_folder(self, study_token: str, number: int) -> Path:
        """Where a trial of this study keeps its checkpoints."""
        folder = self.study.checkpoint.folder_of(self.study.name, study_token, self.runs_dir)
        return folder / f"trial-{number:05d}"

    def run(
        self,
        params: Mapping[str, Any],
        folder: Path | None,
        resume_key: str,
        on_evaluation: Callable[[ScoredEvaluation], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        shared_device: bool = False,
        mirror: CheckpointMirror | None = None,
    ) -> TrialResult:
        """Run one trial with `params` to its outcome.

        `folder` holds its checkpoints (None: it keeps none); those of another `resume_key` are neither used
        nor touched. `mirror` has them for other workers. `on_evaluation` may end the trial by raising a
        TrialEnd. When `should_stop` says so, the trial is checkpointed and ends as `preempted`.
        `shared_device` is recorded: other workers use the device too.

        Raises InputError and RunError for what concerns more than this trial.
        """
        self.ranks.announce((self.study.definition(), dict(params)))
        recorder = TrialRecorder()
        recorder.note(device=device_facts(self.device, shared_device, self.amp.memory_fraction))
        gc.collect()  # cycles, such as the model of a trial that failed
        # Keep the collector from what is imported, and before the second trial from what the first imported.
        # Not after compilation, whose objects are freed later.
        if self._num_started < 2 and not self._has_compiled:
            gc.freeze()
        self._num_started += 1
        values = trace = None
        try:
            with self.ranks.together(ends_trial=True):
                run = TrialRun(self, recorder, on_evaluation, should_stop)
                values = run.run(params, folder, resume_key, mirror)
            outcome, reason = Outcome.COMPLETE, ""
        except TrialEnd as end:
            outcome, reason = end.outcome, str(end)
            if isinstance(end, Nonfinite):
                recorder.note(nonfinite_in_evaluation=end.in_evaluation)
        except ModelError as error:
            # Where the study searches what the model is made of, a combination that cannot be built is
            # this trial's end and not the study's.
            if not is_searched(self.study.search_space, MODEL_SETTINGS):
                raise
            outcome, reason = Incompatible.outcome, str(error)
        except (InputError, RunError):
            raise
        except Exception as error:
            outcome = Outcome.OOM if is_out_of_memory(error) else Outcome.FAILED
            reason, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        return recorder.result(outcome, reason, values, trace)

    def check_study(self, check: Callable[[MultitaskModel, TrialConfig], None] = lambda *_: None) -> None:
        """Check the study's data, tokenizers, models and heads before it is stored.

        Both splits are tokenised, and for each encoder of the study a small batch goes through model and loss
        in fp32, forward and backward; other searched settings take their lowest value or first choice. Then
        `check` sees the untrained model. Leaves nothing but the cache of tokens.

        Raises InputError, and what `check` raises.
        """
        space = self.study.search_space
        lowest = suggest(space, _Lowest()) | {PRECISION: "fp32"}
        # A combination that cannot be built ends one trial, as long as there may be others.
        others = {name: value for name, value in lowest.items() if name not in MODEL_SETTINGS}
        for encoder in getattr(space.get("encoder"), "choices", (None,)):
            named = {} if encoder is None else {"encoder": encoder}
            try:
                self._check_parts(lowest | named, check)
            except ModelError:
                if not is_searched(space, set(MODEL_SETTINGS) - {"encoder"}):
                    raise
                self._check_parts(others | named, check)

    def _check_parts(
        self, params: Mapping[str, Any], check: Callable[[MultitaskModel, TrialConfig], None]
    ) -> None:
        config = build_trial_config(self.study, params, "fp32", self.amp)
        parts = self.parts(config, resolve("fp32", self.device, config.amp))
        if "encoder" not in self.study.search_space:  # which may have other layers
            for part in self._keys(OVERRIDE):
                part_modules(parts.model, part)
        batch = parts.batch(2)
        items = parts.loss_fn.count(batch)
        try:
            with backend_flags(parts.resolution.precision, config.amp):
                batch = batch.to(self.device.torch_device)
                parts.loss_fn(parts.model, batch, items, items).backward()
        except (RuntimeError, MemoryError, IndexError, ValueError, TypeError) as error:
            if is_out_of_memory(error):
                return  # ends a trial, not the study: another device may have more memory
            name = config.encoder if isinstance(config.encoder, str) else "of this config"
            raise ModelError(
                f"the encoder {name} cannot run a batch of this study's data: {type(error).__name__}: {error}"
            ) from error
        check(parts.model, config)

    def parts(self, config: TrialConfig, resolution: Resolution) -> TrialParts:
        """The trial's tokens, its model with the weights of its seed, and its loss."""
        self._has_compiled |= config.compile != "none"
        train_split, validation_split = (self.tokens(name, config) for name in ("train", "validation"))
        manual_seed(config.seed)
        model = self.build_model(config)
        loss_fn = self.loss_fn(config, model, train_split)
        set_float32_parts(model, loss_fn, config.float32_parts)
        compiling = (config.compile, config.compile_scope, config.compile_dynamic)
        return TrialParts(
            config,
            resolution,
            model,
            loss_fn,
            train_split,
            validation_split,
            self.pad_id(config),
            (lambda model: self._apply_compile(model, *compiling)) if config.compile != "none" else None,
        )

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

    def windowing(self, config: TrialConfig) -> Windowing:
        """How this trial's texts are cut."""
        data = self.study.data
        stride = data.stride_of(config.max_length)
        return Windowing(config.max_length, data.long_text, stride, data.pair_segments)

    def tokens(self, split: str, config: TrialConfig) -> TokenizedSplit:
        """The tokenised split for this trial's encoder and length; shared by trials and workers."""
        key = (split, json.dumps(config.encoder, sort_keys=True), config.max_length)
        if key not in self._tokens:
            tokenizer, cache = self.tokenizer(config), self.runs_dir / "cache" / "tokens"
            self._tokens[key] = load_tokenized(self.dataset, split, tokenizer, self.windowing(config), cache)
        few_shapes = self.device.type == "cuda" or config.compile != "none"
        return replace(self._tokens[key], length_multiple=LENGTH_MULTIPLE if few_shapes else 1)

    def known_tokens(self) -> list[tuple[str, TokenizedSplit]]:
        """The splits that were tokenised so far, with their names."""
        return [(split, tokens) for (split, *_), tokens in self._tokens.items()]

    def build_model(self, config: TrialConfig) -> MultitaskModel:
        """The trial's model in fp32 weights, on the device; `set_float32_parts` is not called."""
        encoder = load_encoder(
            config.encoder,
            attention=config.attention,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            revision=self.study.model.revision,
            trust_remote_code=self.study.model.trust_remote_code,
        )
        heads = HeadSettings(**{field.name: getattr(config, field.name) for field in fields(HeadSettings)})
        model = build_model(
            encoder,
            self.tasks,
            heads,
            max_length=config.max_length,
            freeze_layers=config.freeze_layers,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        return model.to(self.device.torch_device)

    def loss_fn(self, config: TrialConfig, model: MultitaskModel, split: TokenizedSplit) -> MultitaskLoss:
        """The trial's loss; class weights are those of the training split."""
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
        groups = parameter_groups(
            model,
            learning_rate=config.learning_rate,
            head_learning_rate=config.head_learning_rate,
            weight_decay=config.weight_decay,
            layerwise_lr_decay=config.layerwise_lr_decay,
        )
        return build_optimizer(
            config.optimizer,
            groups,
            betas=config.betas,
            weight_rounding=config.weight_rounding,
            seed=config.seed,
        )

    def training_args(self, config: TrialConfig) -> TrainingArgs:
        """What the loop needs to know of the trial's settings."""
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
            ranks=self.ranks,
        )


def follow(ranks: ConnectedRanks, runs_dir: Path, should_stop: Callable[[], bool]) -> None:
    """Train together with rank 0 in each of its trials, until it has no more.

    What this rank raises is raised by rank 0 too, which says so; this one then waits for the next trial.
    """
    executor, known = None, None
    while (task := ranks.next_task()) is not None:
        definition, params = task
        of_trials = {key: value for key, value in definition.items() if key not in ("n_trials", "timeout")}
        with contextlib.suppress(Exception):
            with ranks.together():
                if executor is None or of_trials != known:
                    study = StudyConfig.model_validate(definition)
                    executor, known = None, of_trials
                    executor = Executor(study, probe_device(study.device), runs_dir, ranks=ranks)
            executor.run(params, None, "", should_stop=should_stop)


class _Lowest:
    """Stands in for a trial of Optuna's: suggests the first choice and the lowest number."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:  # noqa: ARG002
        return choices[0]

    def suggest_float(self, name: str, low: Any, *_: Any, **__: Any) -> Any:  # noqa: ARG002
        return low

    suggest_int = suggest_float
