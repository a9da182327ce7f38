"""A trial's parts: settings -> precision on this device -> tokens -> model and loss.

Cheap steps come first: an unsupported precision is refused in milliseconds. Rows and tokens are loaded once
for all trials of a study.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpo.config.resolved_study import ResolvedStudy
from hpo.config.study_config import StudyConfig
from hpo.config.trial_config import TrialConfig, build_trial_config
from hpo.config.trial_settings import AUTO, BUDGETS, DEFAULT_EPOCHS
from hpo.data.batches import Batch, collate, num_batches
from hpo.data.dataset import DataSet, load_data
from hpo.data.source_sampling import SourceSampling, source_sampling
from hpo.data.token_cache import load_tokenized
from hpo.device import DeviceInfo
from hpo.errors import Incompatible, ModelError, Unsupported
from hpo.evaluation.contributions import baselines, perfect_statistics
from hpo.extensions import is_own
from hpo.models.adapters import AdapterSettings, add_adapter
from hpo.models.compact_embedding import compact_vocabulary
from hpo.models.encoder import attention_of, check_token_ids, load_encoder, load_tokenizer
from hpo.models.model_parts import set_float32_parts
from hpo.models.multitask import HeadSettings, MultitaskModel, build_model
from hpo.models.own_encoder import REFUSED, OwnEncoder
from hpo.precision.amp import prepare_model
from hpo.precision.environment import environment_overrides
from hpo.precision.frozen import FrozenLinear, store_frozen
from hpo.precision.table import Resolution, base_lacks, resolve, support
from hpo.random_numbers import manual_seed
from hpo.tasks.kind import Kind, kind_of
from hpo.tasks.options import LossOptions
from hpo.tasks.tokenized_split import TokenizedSplit, Windowing
from hpo.training.budget import Budget
from hpo.training.compilation import apply_compile
from hpo.training.distributed import world_size
from hpo.training.loop import TrainingArgs
from hpo.training.losses import MultitaskLoss, check_loss
from hpo.training.optim import build_optimizer, own_schedule, parameter_groups
from hpo.training.training_data import TrainingData
from hpo.trial.objectives import decision_metrics

_logger = logging.getLogger("hpo.trial")


class TrialLoader:
    """Loads the data of a study at once, tokenizers and tokens on demand, and keeps them.

    Raises DataError if the study's data cannot be used.
    """

    apply_compile: Callable[..., object] = staticmethod(apply_compile)
    """Compiles a model in place."""

    def __init__(self, resolved: ResolvedStudy, runs_dir: Path) -> None:
        self.study, self.device = resolved.config, resolved.device
        self.cache_dir = runs_dir / "cache" / "tokens"
        self.dataset = load_data(self.study.data)
        self.tasks = self.dataset.tasks
        for task in self.tasks:
            for warning in self.dataset.span_warnings(task.name):
                _logger.warning("`%s`: %s", task.name, warning)
        self._tokenizers: dict[str, Any] = {}
        self._tokens: dict[tuple[str, str, int], TokenizedSplit] = {}

    @cached_property
    def baseline(self) -> dict[str, float]:
        """Scores of the best constant predictions on validation (`hpo.evaluation.contributions`)."""
        known = [task for task in self.tasks if type(kind_of(task)).constant_rows is not Kind.constant_rows]
        scores = baselines(perfect_statistics(known, self.dataset.splits["validation"]))
        if len(known) < len(self.tasks):
            scores.pop("score", None)
        return scores

    def tokenizer(self, config: TrialConfig) -> Any:
        key = json.dumps(config.encoder, sort_keys=True)
        if key not in self._tokenizers:
            self._tokenizers[key] = load_tokenizer(
                config.encoder,
                revision=self.study.model.revision,
                trust_remote_code=self.study.model.trust_remote_code,
            )
        return self._tokenizers[key]

    def pad_id(self, config: TrialConfig) -> int:
        """Return the padding token; 0, behind the attention mask, for a tokenizer without one."""
        return self.tokenizer(config).pad_token_id or 0

    def windowing(self, config: TrialConfig) -> Windowing:
        """Return how the trial's texts are cut."""
        data = self.study.data
        stride = data.stride_of(config.max_length)
        return Windowing(config.max_length, data.long_text, stride, data.pair)

    def tokens(self, split: str, config: TrialConfig) -> TokenizedSplit:
        """Return the split, tokenized for the trial's encoder and length; workers share it on disk."""
        key = (split, json.dumps(config.encoder, sort_keys=True), config.max_length)
        if key not in self._tokens:
            tokenizer, windowing = self.tokenizer(config), self.windowing(config)
            self._tokens[key] = load_tokenized(self.dataset, split, tokenizer, windowing, self.cache_dir)
        has_few_lengths = self.device.type == "cuda" or config.compile != "none"
        return replace(self._tokens[key], has_few_lengths=has_few_lengths)

    def sampling(self, config: TrialConfig, train: TokenizedSplit) -> SourceSampling | None:
        """Return how the trial draws from the sources of the data; None if there are none."""
        num_rows = self.dataset.sources.get("train", {})
        return source_sampling(train, num_rows, config.sampling_temperature, config.sampling_weight)

    def used_ids(self, config: TrialConfig) -> NDArray[Any]:
        """Return the tokens of training and validation, and padding: sorted, each once."""
        splits = (self.tokens(name, config) for name in ("train", "validation"))
        return np.unique(np.concatenate([[self.pad_id(config)], *(split.used_ids for split in splits)]))

    def build_encoder(self, config: TrialConfig) -> nn.Module:
        """Return a new encoder in fp32 weights, on the CPU."""
        if is_own("encoder", config.encoder):
            for name in REFUSED:
                if getattr(config, name) != TrialConfig.model_fields[name].default:
                    raise ModelError(
                        f"{name}: the encoder `{config.encoder}` of your own code does not have it. "
                        "Leave it out."
                    )
            encoder: nn.Module = OwnEncoder(str(config.encoder), config.option)
        else:
            encoder = load_encoder(
                config.encoder,
                attention=config.attention,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                revision=self.study.model.revision,
                trust_remote_code=self.study.model.trust_remote_code,
            )
        check_token_ids(encoder, self.tokenizer(config))
        return encoder

    def build_model(self, config: TrialConfig) -> MultitaskModel:
        """Return a new model on the device: frozen layers in `base_precision`, the others in fp32.

        The CPU stores the frozen layers: the device never holds them in fp32, and all devices have the same.
        """
        encoder = self.build_encoder(config)
        if config.adapter != "none":
            encoder = add_adapter(encoder, AdapterSettings(**_of(config, AdapterSettings)))
        model = build_model(
            encoder,
            self.tasks,
            HeadSettings(**_of(config, HeadSettings)),
            max_length=config.max_length,
            freeze_layers=config.freeze_layers,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        store_frozen(model, config.base_precision, torch.float32)
        if config.base_precision != "fp32" and FrozenLinear not in map(type, model.modules()):
            raise ModelError(
                f"base_precision: `{config.base_precision}` needs frozen layers of `torch.nn.Linear`, but "
                f"{type(encoder).__name__} has none (those of GPT-2 are Conv1D). Use fp32."
            )
        if self.device.type == "cpu":
            for weight in model.parameters():  # a weight mapped from a file would keep the file in memory
                weight.data = weight.data.clone()
        return model.to(self.device.torch_device)


def _of(config: TrialConfig, settings: type[Any]) -> dict[str, Any]:
    """Return the trial's values for the fields of `settings`."""
    return {field.name: getattr(config, field.name) for field in fields(settings)}


@dataclass(frozen=True)
class TrialParts:
    """A trial's settings, its model of `TrialLoader.build_model`, its loss and its data."""

    study: StudyConfig
    device: DeviceInfo
    dataset: DataSet
    config: TrialConfig
    resolution: Resolution
    model: MultitaskModel
    loss_fn: MultitaskLoss
    data: TrainingData
    used_ids: NDArray[Any]
    """See `TrialLoader.used_ids`."""
    compile: Callable[[MultitaskModel], object] | None
    """Compiles a model in place; None: the trial is not compiled."""
    build_reference: Callable[[], MultitaskModel] | None
    """Builds the model again with all weights in fp32. None: the model has such weights."""

    def batch(self, first: int, last: int = 0) -> Batch:
        """Return the `first` shortest and the `last` longest windows of the training split, on the CPU."""
        order = np.argsort(self.data.train.lengths_W)
        windows = np.concatenate([order[:first], order[::-1][:last]])
        return collate(self.data.train, windows, self.loss_fn.tasks, self.data.pad_id)

    def with_float32_parts(self, names: Sequence[str]) -> TrialParts:
        """Let only these parts of the model compute in fp32, in place."""
        set_float32_parts(self.model, names)
        return replace(self, config=self.config.model_copy(update={"fp32_parts": tuple(names)}))

    def prepare(self) -> torch.optim.Optimizer:
        """Give the model its weights for training, and return their optimizer."""
        config = self.config
        prepare_model(self.model, self.resolution.precision)
        compact_vocabulary(self.model, config.optimizer, self.used_ids)
        adapter_rate = None if config.adapter == "none" else config.lora_learning_rate
        groups = parameter_groups(
            self.model,
            learning_rate=adapter_rate or config.learning_rate,
            head_learning_rate=config.head_learning_rate or config.learning_rate,
            weight_decay=config.weight_decay,
            layerwise_lr_decay=config.layerwise_lr_decay,
        )
        embeddings = [one.weight for one in self.model.modules() if isinstance(one, nn.Embedding)]
        return build_optimizer(
            config.optimizer,
            groups,
            betas=config.betas,
            option=config.option,
            state=config.optimizer_state,
            fp32_state=embeddings,
        )


def build_trial(
    resolved: ResolvedStudy,
    params: Mapping[str, Any],
    loader: TrialLoader,
    note: Callable[..., None] = lambda **_: None,
) -> TrialParts:
    """Build the parts of the trial of a study with `params`.

    `note` records facts about its precision and data early. Raises InputError for an impossible setting,
    TrialEnd if the precision cannot run here.
    """
    study, device = resolved.config, resolved.device
    config = build_trial_config(study, params, resolved.preset_precision, resolved.amp)
    check_loss(loader.tasks, config.loss)
    requested = config.fp_precision
    note(precision={"requested": requested, "effective": None, "support": support(requested, device).level})
    base = config.base_precision
    resolution = replace(resolve(requested, device, config.amp), base=base)
    if config.adapter != "none":
        note(base_precision={"requested": base, "effective": None})
    if lacking := base_lacks(base, device):
        raise Unsupported(lacking)
    if resolution.precision.float8 and base != "fp32":
        raise Incompatible(f"fp8 has linear layers of its own, so the base cannot be {base}. Use bf16.")
    if config.fp32_parts and resolution.precision.weights != "float32":
        if study.comparison is None:
            raise Incompatible(
                f"fp32_parts: `{resolution.effective}` has no weights in fp32, so no part can compute in it. "
                "Search `fp32_parts` with `when: {fp_precision: [bf16, fp16]}`."
            )
        # A comparison gives the same settings to all precisions.
        note(fp32_parts={"requested": config.fp32_parts, "resolved": ()})
        config = config.model_copy(update={"fp32_parts": ()})
    note(precision=asdict(resolution), environment=environment_overrides())
    parts = assemble(study, config, resolution, loader)
    split, sampling = parts.data.train, parts.data.sampling
    note(
        data={
            "num_examples": len(split.examples),
            "splits": {name: len(rows) for name, rows in loader.dataset.splits.items()},
            "num_cut_examples": split.num_cut_examples,
            "num_lost_spans": dict(split.num_lost_spans),
            **({"sources": sampling.facts()} if sampling else {}),
        },
        baseline=loader.baseline,
        attention={"requested": config.attention, "effective": parts.config.attention},
    )
    return parts


def assemble(
    study: StudyConfig, config: TrialConfig, resolution: Resolution, loader: TrialLoader
) -> TrialParts:
    """Build the parts of a trial from its settings and precision. The seed gives the weights."""
    train, validation = (loader.tokens(name, config) for name in ("train", "validation"))

    def build(config: TrialConfig) -> MultitaskModel:
        manual_seed(config.seed)
        return loader.build_model(config)

    model = build(config)
    if config.fp32_parts != AUTO:
        set_float32_parts(model, config.fp32_parts)
    config = config.model_copy(update={"attention": attention_of(model.encoder)})
    in_fp32 = config.model_copy(update={"base_precision": "fp32"})
    loss_fn = _loss_fn(config, model, train)
    return TrialParts(
        study,
        loader.device,
        loader.dataset,
        config,
        resolution,
        model,
        loss_fn,
        TrainingData(
            train,
            validation,
            loader.pad_id(config),
            loader.sampling(config, train),
            loader.dataset.sources.get("validation", {}),
        ),
        loader.used_ids(config),
        None
        if config.compile == "none"
        else lambda model: loader.apply_compile(model, config.compile, config.compile_scope),
        None if config.base_precision == "fp32" else lambda: build(in_fp32),
    )


def _loss_fn(config: TrialConfig, model: MultitaskModel, split: TokenizedSplit) -> MultitaskLoss:
    """Return the trial's loss, with class weights of the training split."""
    weights: dict[str, Tensor | None] = {}
    if config.class_weighting == "balanced":
        device = next(model.parameters()).device
        chunks = np.array_split(np.arange(split.num_windows), max(1, split.num_windows // 256))
        for task in model.tasks:
            targets = (collate(split, chunk, (task,), 0).targets[task.name] for chunk in chunks)
            weight = kind_of(task).class_weights(targets)
            weights[task.name] = None if weight is None else weight.to(device)
    return MultitaskLoss(
        model.tasks,
        LossOptions(config.loss, config.label_smoothing, config.focal_gamma, config.option),
        config.loss_weight,
        weights,
        model.log_variance if config.loss_weighting == "uncertainty" else None,
    )


def fit_pruner(study: StudyConfig, dataset: DataSet) -> tuple[StudyConfig, str]:
    """Return a new study with the pruner for its data, and the reason.

    A pruner of the study file stays. `PrunerConfig.fitted` moves its first rung if the file gives none, and
    `PrunerConfig.default_of` chooses a pruner if the file names none. Costs are counted in rows, so all
    machines choose the same: an update costs three forward passes.
    """
    training, pruner = study.training, study.pruner
    is_given = "pruner.name" in study.given
    if study.has_own_loop:
        return study, "it is set in the study file" if is_given else "the study's own code trains"
    if training.max_steps or training.max_seconds or study.search_space.keys() & {*BUDGETS}:
        default = "it is the default for trials that are not measured in epochs"
        return study, "it is set in the study file" if is_given else default
    epochs = training.epochs or DEFAULT_EPOCHS
    cost = len(dataset.splits["validation"]) / (3 * epochs * len(dataset.splits["train"]))
    num_evaluations = len(study.evaluation.shares(epochs))
    chosen = pruner.fitted(cost) if is_given else pruner.default_of(cost, num_evaluations)
    reason = "it is set in the study file" if is_given else "no objective is a metric of the model"
    if pruner.name == "promote":
        start, mean = pruner.fitted(cost).costs(cost, num_evaluations)
        costs = "costs" if chosen.name == "promote" else "would cost with `promote`"
        share = f"{start:.0%} of a whole trial, and a configuration {mean:.0%} on average"
        reason = f"{f'{reason}; ' if is_given else ''}the first stage of a trial {costs} {share}"
    return (study if chosen is pruner else study.with_values(pruner=chosen)), reason


def training_args(study: StudyConfig, config: TrialConfig, num_windows: int) -> TrainingArgs:
    """Return the trial's settings for the loop; `num_windows` counts windows of the training split."""
    evaluation, max_steps = study.evaluation, config.max_steps
    if config.epochs is not None:
        max_steps = max(1, round(config.epochs * num_batches(num_windows, config.batch_size)))
    rows_of_rank = -(-config.batch_size // world_size())
    return TrainingArgs(
        budget=Budget(max_steps, config.max_seconds),
        batch_size=config.batch_size,
        micro_batch_size=min(config.micro_batch_size or config.batch_size, rows_of_rank),
        seed=config.seed,
        schedule=own_schedule(config.schedule, config.option) or config.schedule,
        warmup_ratio=config.warmup_ratio,
        max_grad_norm=config.max_grad_norm or 0.0,
        evaluate_at=evaluation.shares(config.epochs, study.pruner.rungs),
        evaluation_tokens=evaluation.batch_tokens,
        decision_metrics=decision_metrics([objective.metric for objective in study.objective]),
        cuda_graphs=not study.code if config.cuda_graphs is None else config.cuda_graphs,
    )
